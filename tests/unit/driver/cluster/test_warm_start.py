"""Tests of the modules that the warm servers import, and of the processes that they serve."""

import importlib.util
import os
from pathlib import Path

import pytest

from grpo_ray.driver.cluster.warm_start import HEAVY, LIGHT, parent_of, raylet_of

OWN = [name for name in (*LIGHT.early, *LIGHT.late, *HEAVY.early, *HEAVY.late) if name.startswith("grpo_ray.")]


@pytest.mark.parametrize("name", OWN)
def test_preloaded_module_of_the_package_exists(name: str) -> None:
    # A server skips a module that it cannot import, so a renamed one would only make workers start slowly.
    module, _, function = name.partition(":")
    assert (found := importlib.util.find_spec(module)) is not None and found.origin is not None
    assert not function or f"\ndef {function}(" in Path(found.origin).read_text()


# This process stands for a worker: its parent is the raylet, and its parent's parent the driver.

RAYLET = os.getppid()
USER = os.geteuid()


@pytest.fixture
def driver() -> int:
    return parent_of(RAYLET)


@pytest.fixture
def program() -> str:
    """Program of this process's parent."""
    return os.readlink(f"/proc/{RAYLET}/exe")


def test_raylet_of_its_child_is_the_parent(driver: int, program: str) -> None:
    assert raylet_of(os.getpid(), USER, driver=driver, raylet=program) == RAYLET


def test_raylet_of_another_users_process_is_refused(driver: int, program: str) -> None:
    with pytest.raises(PermissionError, match=rf"process {os.getpid()} of user {USER + 1} was not started by"):
        raylet_of(os.getpid(), USER + 1, driver=driver, raylet=program)


def test_raylet_of_another_drivers_process_is_refused(driver: int, program: str) -> None:
    with pytest.raises(PermissionError):
        raylet_of(os.getpid(), USER, driver=driver + 1, raylet=program)


def test_raylet_of_child_of_another_program_is_refused(driver: int, program: str) -> None:
    with pytest.raises(PermissionError):
        raylet_of(os.getpid(), USER, driver=driver, raylet=__file__)


@pytest.mark.parametrize("process", [0, 2**22 + 1], ids=["of another namespace", "ended"])
def test_raylet_of_process_that_is_not_there_is_refused(process: int, driver: int, program: str) -> None:
    with pytest.raises(OSError):
        raylet_of(process, USER, driver=driver, raylet=program)
