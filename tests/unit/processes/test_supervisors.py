"""Tests of the variables and the memory of supervisors."""

import ctypes
import os
import signal
import socket
from pathlib import Path

import pytest
from other_user import CLONE_NEWNS, MS_PRIVATE, MS_REC, NOBODY

from grpo_ray.processes.supervisors import (
    PR_SET_DUMPABLE,
    begin_supervisor,
    hide_memory,
    hides_processes,
    is_needed,
    secret_variables,
    supervisor_environment,
)


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


def test_supervisor_ignores_interrupts_and_learns_of_ended_children() -> None:
    client, own = socket.socketpair()
    with client, own:
        client.settimeout(60.0)
        if (pid := os.fork()) == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                sock = begin_supervisor(os.dup(own.fileno()))
                handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGCHLD)]
                state = handlers == [signal.SIG_IGN, signal.SIG_DFL], sock.get_inheritable()
                sock.sendall(repr((*state, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert client.recv(64) == b"(True, False, 0)"


@pytest.mark.parametrize(
    ("options", "hides"),
    [("rw", False), ("rw,hidepid=0", False), ("rw,hidepid=off", False), ("rw,hidepid=2", True),
     ("rw,gid=5,hidepid=invisible", True)],
)  # fmt: skip
def test_hides_processes_reads_the_last_mount_of_proc(options: str, hides: bool, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(
        "22 1 254:0 / / rw - ext4 /dev/root rw\n"
        "23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw,hidepid=1\n"
        f"24 23 0:22 / /proc rw - proc proc {options}\n"
        "25 22 0:23 / /mnt/proc rw - proc proc rw,hidepid=2\n"
    )
    assert hides_processes(tmp_path / "mountinfo") == hides
    assert not hides_processes(tmp_path / "missing")


def under_hidepid(results: int) -> None:
    """Write the part of the process's fork that a user other than root sees where /proc is mounted with hidepid."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWNS)
    libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    if libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), b"hidepid=2") < 0:
        os.write(results, b"refused")
        return
    os.setgroups([])  # members of root's group see all processes
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # the change of the user has cleared it
    hide_memory()
    if (fork := os.fork()) == 0:
        signal.pause()
    os.write(results, b"visible" if os.path.exists(f"/proc/{fork}/stat") else b"invisible")
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts /proc")
def test_forks_of_a_hidden_process_are_visible_to_it_under_hidepid() -> None:
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            under_hidepid(writable)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    result = os.read(readable, 16)
    for descriptor in (readable, writable):
        os.close(descriptor)
    if result == b"refused":
        pytest.skip("this container mounts no /proc")
    assert result == b"visible"
