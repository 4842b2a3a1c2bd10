"""Tests of `scripts/set_up.py` without a network: pip's settings, routes, and messages when something is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import set_up
from packaging.requirements import Requirement

ROOT = Path(set_up.__file__).parents[1]


def requirements(extra: str) -> dict[str, Requirement]:
    """Return package -> requirement of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [Requirement(line) for line in project["optional-dependencies"][extra]]
    return {each.name: each for each in listed}


def test_parse_pip_settings_translates_every_source_of_packages() -> None:
    listed = """global.cert='/etc/ca.pem'
global.extra-index-url='file:///a/simple file:///b/simple'
global.index-url='https://packages.example/simple'
global.trusted-host='packages.example'
global.timeout='60'
"""
    assert set_up.parse_pip_settings(listed) == {
        "UV_DEFAULT_INDEX": "https://packages.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "packages.example",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }


def test_parse_pip_settings_environment_wins_over_files() -> None:
    listed = ":env:.find-links='/here'\nglobal.find-links='/there'\ninstall.find-links='/elsewhere'\n"
    assert set_up.parse_pip_settings(listed) == {"UV_FIND_LINKS": "/here"}


def test_parse_pip_settings_several_folders_are_separated_by_commas() -> None:
    assert set_up.parse_pip_settings("global.find-links='\\n/one\\n/two'\n") == {"UV_FIND_LINKS": "/one,/two"}


def test_parse_pip_settings_of_other_commands_are_left_out() -> None:
    assert set_up.parse_pip_settings("download.find-links='/here'\nfreeze.user='true'\n") == {}


@pytest.mark.parametrize("value, expected", [("true", {"UV_NO_INDEX": "1"}), ("false", {})])
def test_parse_pip_settings_no_index_is_a_switch(value: str, expected: dict[str, str]) -> None:
    assert set_up.parse_pip_settings(f"global.no-index='{value}'\n") == expected


def test_torch_of_the_last_route_is_the_one_of_the_extra() -> None:
    assert Requirement(set_up.TORCH) == requirements("cpu")["torch"]


def test_excluded_packages_are_no_requirements_of_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for each in project["optional-dependencies"].values() for line in each)]
    assert not {Requirement(line).name for line in lines} & {name for each in set_up.EXCLUDED.values() for name in each}


def test_check_python_too_old_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up.sys, "version_info", (3, 9, 2))
    with pytest.raises(set_up.SetUpError, match=r"Python 3\.9 is too old, 3\.11 or later .*make setup PYTHON="):
        set_up.check_python()


def test_create_environment_without_ensurepip_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)  # as on Debian without python3-venv
    monkeypatch.setattr(set_up.sys, "executable", "/usr/bin/python3")
    monkeypatch.setenv("PATH", str(tmp_path))  # no uv
    version = ".".join(map(str, sys.version_info[:2]))
    with pytest.raises(set_up.SetUpError, match=rf"apt-get install python{version}-venv, or install uv"):
        set_up.create_environment(tmp_path / "venv")


def test_provide_libnuma_that_cannot_be_fetched_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "load", lambda name: {**load(name), "is_available": lambda: False})
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get
    with pytest.raises(set_up.SetUpError, match=r"^libnuma\.so\.1, which vLLM's CPU build needs, is not installed; "):
        set_up.provide_libnuma(tmp_path)


load = set_up.load


def test_set_up_without_a_system_package_ends_with_one_line(tmp_path: Path) -> None:
    """Set up as on a minimal system: run by a Python whose module `ensurepip` is missing."""
    (tmp_path / "ensurepip.py").write_text("raise ImportError('left out by the distribution')\n")
    done = subprocess.run(
        [sys.executable, set_up.__file__, "--venv", tmp_path / "venv", "--accelerator", "cpu"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("set-up: this Python cannot create virtual environments; apt-get install ")
