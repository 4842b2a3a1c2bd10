"""Supported releases of the libraries, and their Python files.

The ranges are those of `pyproject.toml`. A release that is installed is read where it is. Any other is fetched with
pip, which follows the user's own configuration of pip; of its wheel for Linux and CUDA only the Python files are kept.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

LIBRARIES = ("vllm", "trl", "transformers", "accelerate", "ray")
"""Libraries that are checked. The package of each has its name."""

PLATFORMS = tuple(f"manylinux{each}_x86_64" for each in ("_2_35", "_2_31", "_2_28", "_2_17", "2014"))
"""Platforms of the wheels, whatever machine this runs on: a GPU cluster's."""

PYTHON = "3.12"
"""Python version of the wheels."""


@dataclass(frozen=True)
class Release:
    """One release of a library."""

    library: str
    version: str
    folder: Path
    """Folder that the package is in."""
    requires: tuple[Requirement, ...] = ()
    """Requirements of the release, without extras."""

    def __str__(self) -> str:
        return f"{self.library} {self.version}"


class FetchError(OSError):
    """pip could not download a release."""


def supported(project: Path) -> dict[str, Requirement]:
    """Return the requirement of each library in a `pyproject.toml`, without extras."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    lines = [*table["dependencies"], *table["optional-dependencies"]["gpu"]]
    found = {each.name: each for each in map(Requirement, lines)}
    return {name: Requirement(f"{name}{found[name].specifier}") for name in LIBRARIES}


def oldest(requirement: Requirement) -> str:
    """Return the oldest version that a requirement allows.

    Raises:
        ValueError: the requirement has no lower bound.
    """
    bounds = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
    if len(bounds) != 1:
        raise ValueError(f"pyproject.toml: {requirement} must have one lower bound (>=), the oldest supported version")
    return bounds[0]


def resolve(requirement: str) -> str:
    """Return the newest version that a requirement allows, as pip chooses it.

    Raises:
        FetchError: there is no such release, or the package index cannot be reached.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = _pip("install", "--dry-run", "--ignore-installed", f"--target={scratch}", "--report=-", requirement)
    [found] = json.loads(report)["install"]
    return str(found["metadata"]["version"])


def fetch(library: str, version: str, folder: Path) -> Release:
    """Download a release and unpack its Python files, unless they are there.

    Args:
        folder: gets a folder for each release.

    Raises:
        FetchError: there is no such release, or the package index cannot be reached.
    """
    target = folder / f"{library}-{version}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _pip("download", "--no-cache-dir", f"--dest={scratch}", f"{library}=={version}")
            [wheel] = Path(scratch).glob("*.whl")
            files = Path(scratch, "files")
            _unpack(wheel, files)
            files.rename(target)  # all at once: an interrupted run leaves nothing behind
    return _read_release(library, target)


def _pip(command: str, *arguments: str) -> str:
    """Run pip for wheels of a GPU cluster; return its output."""
    platforms = [f"--platform={each}" for each in PLATFORMS]
    wheels = ["--no-deps", "--only-binary=:all:", *platforms, f"--python-version={PYTHON}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", *wheels, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip {command} {arguments[-1]} failed: {last}")
    return done.stdout


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpack the Python files and the metadata; a compiled module leaves an empty file with its name."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".pyi", ".dist-info/METADATA")):
                archive.extract(name, folder)
            elif name.endswith(".so"):
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()


def _read_release(library: str, folder: Path) -> Release:
    [metadata] = folder.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    fields = [line.partition(": ")[::2] for line in lines]
    [version] = [value for key, value in fields if key == "Version"]
    return Release(library, version, folder, requirements(value for key, value in fields if key == "Requires-Dist"))


def installed(library: str) -> Release | None:
    """Return the release that is installed in this environment, or None."""
    try:
        found = distribution(library)
    except PackageNotFoundError:
        return None
    return Release(library, found.version, Path(str(found.locate_file(""))), requirements(found.requires or ()))


def requirements(lines: Iterable[str]) -> tuple[Requirement, ...]:
    """Return the requirements that apply without extras on the platform of the wheels."""
    environment = {"extra": "", "platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux"}
    environment |= {"python_version": PYTHON}
    found = [Requirement(line) for line in lines]
    return tuple(each for each in found if each.marker is None or each.marker.evaluate(environment))


def oldest_and_newest(project: Path, folder: Path) -> list[list[Release]]:
    """Return two sets of releases: the oldest supported one of each library, and the newest.

    Args:
        folder: downloads are unpacked here.

    Raises:
        FetchError: see `fetch`.
    """
    ranges = supported(project)
    first = {name: resolve(f"{name}=={oldest(requirement)}") for name, requirement in ranges.items()}
    last = {name: resolve(str(requirement)) for name, requirement in ranges.items()}
    return [[obtain(name, version, folder) for name, version in each.items()] for each in (first, last)]


def obtain(library: str, version: str, folder: Path) -> Release:
    """Return a release: the installed one if it has this version, otherwise fetched."""
    here = installed(library)
    return here if here is not None and here.version == version else fetch(library, version, folder)


def requirement_conflicts(releases: Sequence[Release]) -> list[str]:
    """Return the requirements of releases that the other releases do not meet."""
    versions = {each.library: each.version for each in releases}
    return [
        f"{release} requires {needed}, but {needed.name} {versions[needed.name]} is supported"
        for release in releases
        for needed in release.requires
        if needed.name in versions and not needed.specifier.contains(versions[needed.name])
    ]
