"""Tests of the variables and the memory of supervisors."""

import ctypes
import os
from pathlib import Path

import pytest

from grpo_ray.processes.supervisors import hide_memory, is_needed, secret_variables, supervisor_environment


@pytest.mark.parametrize("name", ["PATH", "HOME", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "COVERAGE_PROCESS_START"])
def test_variables_of_the_system_are_needed(name: str) -> None:
    assert is_needed(name)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MYPATH", "RAY_ADDRESS", "PWD"])
def test_other_variables_are_not_needed(name: str) -> None:
    assert not is_needed(name)


def test_secret_variables_have_a_secret_name_or_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    secrets = {
        "HF_TOKEN": "x", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "x",
        "AZURE_STORAGE_CONNECTION_STRING": "x", "SSH_AUTH_SOCK": "/run/x", "PROXY": "http://user:password@host",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/x.json",
    }  # fmt: skip
    for name, value in {**secrets, "DATA": "/data", "PWD": "/home", "PATH": "/bin", "PYTHONPATH": "/x"}.items():
        monkeypatch.setenv(name, value)
    assert secret_variables() == sorted(secrets)


def test_environment_has_the_variables_that_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("WITHHELD", "1")
    environment = supervisor_environment(tmp_path, lambda name: name != "WITHHELD")
    assert environment["GIVEN"] == "1" and "WITHHELD" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["OMP_NUM_THREADS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_hidden_process_cannot_be_dumped() -> None:
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            hide_memory()
            os.write(writable, b"%d" % ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(readable, 8) == b"0"
    for descriptor in (readable, writable):
        os.close(descriptor)
