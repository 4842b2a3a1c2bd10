"""The package as users install it: a wheel, in an environment that cannot see this clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import set_up
from small_runs import rows_of

ROOT = Path(__file__).parents[2]
VERSION = "grpo_ray-0.1.0"


@dataclass(frozen=True)
class Installed:
    """Virtual environment with the wheel, and an empty folder to work in."""

    wheel: Path
    bin: Path
    folder: Path

    def run(self, *command: str, **environment: str) -> str:
        """Run a program of the environment in the folder; return its output."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env=kept | {"RAY_ADDRESS": "local", "HOME": str(self.folder.parent)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, since a build leaves files beside them."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "grpo_ray", source / "grpo_ray", ignore=shutil.ignore_patterns("__pycache__"))
    # Without isolation it takes the setuptools of this environment, and needs no package index.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, whose libraries are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file is added to the path as it is: the .pth files there, of which one names this clone, are not
    # read.
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = str(environment / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, wheel], check=True)
    (folder / "empty").mkdir()
    return Installed(wheel, environment / "bin", folder / "empty")


def test_wheel_has_the_files_of_the_package_and_no_others(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "grpo_ray").rglob("*") if path.is_file()}
    ours = {name for name in names if not name.startswith(f"{VERSION}.dist-info/")}
    assert ours == {name for name in files if not name.endswith(".pyc")}


def test_wheel_trains_outside_of_a_clone(installed: Installed) -> None:
    """`grpo-ray init`, and `train` of the config that it writes, in an empty folder."""
    where = installed.run("python", "-c", "import grpo_ray; print(grpo_ray.__file__, grpo_ray.__version__)")
    assert where.startswith(str(installed.bin.parent)) and where.endswith(" 0.1.0\n")
    assert "wrote my_run.yaml" in installed.run("grpo-ray", "init")
    small = ["grpo.max_steps=2", "grpo.save_steps=2", "grpo.prompts_per_step=4", "grpo.num_generations=4"]
    small += ["cluster.num_workers=1", "data.heldout_limit=8"]
    # The reward of `init`, which a comment of its YAML names.
    own = 'rewards.functions=[correctness, "my_rewards:short_answer"]'
    installed.run("grpo-ray", "train", "my_run.yaml", own, *small, PYTHONPATH=".")
    rows = rows_of(installed.folder.parent / "grpo_ray_runs" / "my_run")
    assert [row["step"] for row in rows] == [1, 2] and "reward/short_answer_mean" in rows[-1]


@pytest.mark.slow
def test_wheel_in_a_fresh_environment_checks_and_trains_an_example(installed: Installed, tmp_path: Path) -> None:
    """All libraries are installed anew, with the settings of pip on this machine: some gigabytes."""
    environment = tmp_path / "venv"
    python = set_up.create_environment(environment)
    set_up.provide_libnuma(environment)
    try:
        route, _ = set_up.find_route(python, "cpu", ["cpu"])
    except set_up.SetUpError as error:
        pytest.skip(f"needs a package index: {error}")
    requirement = f"grpo-ray[cpu] @ {installed.wheel.as_uri()}"
    assert set_up.uv(python, ["install", "--quiet", requirement], "cpu", route).returncode == 0
    (tmp_path / "empty").mkdir()
    fresh = Installed(installed.wheel, environment / "bin", tmp_path / "empty")
    short = ["--example", "arithmetic", "grpo.max_steps=2", "data.heldout_limit=20"]
    assert "rewards, tried on the first problems" in fresh.run("grpo-ray", "check", "--sample", "20", *short)
    text = fresh.run("grpo-ray", "train", *short)
    assert "step 2/2" in text
    assert len(rows_of(tmp_path / "grpo_ray_runs" / "arithmetic")) == 2
