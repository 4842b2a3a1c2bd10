"""Tests of the levels of isolation, and of their trial."""

import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import isolation, landlock
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.isolation import confine, isolation_issue, prepare, readable_places, try_to_escape

needs_landlock = pytest.mark.skipif(not landlock.landlock_version(), reason="this kernel has no Landlock")


@pytest.fixture(autouse=True)
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(isolation, "_isolation", isolation._Isolation())
    yield


@pytest.fixture
def without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "landlock_version", lambda: 0)


def end_of_child(own: Path) -> str:
    """Confine a forked process; return its error, or what it can do then."""
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            confine(str(own), {})
            os.write(writable, b"listed" if os.listdir("/root" if os.geteuid() == 0 else "/") is not None else b"")
        except (OSError, ConfinementError) as error:
            os.write(writable, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(pid, 0)
    with open(readable, encoding="utf-8") as result:
        return result.read()


@needs_landlock
@pytest.mark.parametrize("wanted", ["required", "best"])
def test_prepared_process_is_confined(tmp_path: Path, wanted: str) -> None:
    assert prepare(wanted, str(tmp_path)).startswith("code that the policy writes is confined (Landlock ")
    assert end_of_child(tmp_path) == "PermissionError"
    assert list(tmp_path.iterdir()) == []  # the trial has cleaned up


@needs_landlock
def test_unprepared_process_is_confined(tmp_path: Path) -> None:
    assert end_of_child(tmp_path) == "PermissionError"


def test_none_confines_nothing(tmp_path: Path) -> None:
    assert "not confined (rollout.isolation=none)" in prepare("none", str(tmp_path))
    assert end_of_child(tmp_path) == "listed"


def test_required_is_refused_without_landlock(tmp_path: Path, without_landlock: None) -> None:
    with pytest.raises(ConfinementError, match=r"cannot be confined here: .* Landlock .*rollout\.isolation=best"):
        prepare("required", str(tmp_path))
    assert end_of_child(tmp_path) == "ConfinementError"


def test_unprepared_process_ends_without_landlock(tmp_path: Path, without_landlock: None) -> None:
    assert end_of_child(tmp_path) == "ConfinementError"


def test_best_goes_on_without_landlock_and_says_so(tmp_path: Path, without_landlock: None) -> None:
    assert "is not confined here: the kernel has no Landlock" in prepare("best", str(tmp_path))
    assert end_of_child(tmp_path) == "listed"


class Leaky(Confinement):
    """Confinement that restricts nothing."""

    def apply(self, own: object, limits: object) -> None:
        pass


@needs_landlock
def test_trial_notices_a_confinement_that_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    escaped = try_to_escape(Leaky([]), str(tmp_path))
    assert {"the network", "sockets of the system", "files of others", "folders of others", "other processes"} <= set(
        escaped
    )
    monkeypatch.setattr(isolation, "Confinement", Leaky)
    with pytest.raises(ConfinementError, match="confined code could reach the network, "):
        prepare("required", str(tmp_path))
    assert end_of_child(tmp_path) == "ConfinementError"
    assert "could reach the network" in prepare("best", str(tmp_path))


@needs_landlock
def test_confinement_in_which_nothing_runs_is_refused(tmp_path: Path) -> None:
    class Broken(Confinement):
        def apply(self, own: object, limits: object) -> None:
            raise ConfinementError("refused")

    with pytest.raises(ConfinementError, match="a confined process cannot run"):
        try_to_escape(Broken([]), str(tmp_path))


@pytest.fixture
def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a shell script, which sets up what it is given, the interpreter here."""

    def make(setting: str) -> None:
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "python"
        script.write_text(f'#!/bin/sh\n{setting}\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return make


@needs_landlock
def test_libraries_of_the_interpreter_elsewhere_can_be_read_but_not_their_folder(
    tmp_path: Path, wrapper: Callable[[str], None]
) -> None:
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libz.so" in line]
    if not loaded or not hasattr(zlib, "__file__"):
        pytest.skip("zlib is a part of this interpreter")
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libz.so.1"
    shutil.copy(loaded[0], library)
    wrapper(f"export LD_LIBRARY_PATH={library.parent}")
    prepare("required", str(tmp_path))
    assert isolation._isolation.confinement is not None
    places = isolation._isolation.confinement.read
    assert str(library) in places and str(library.parent) not in places


@needs_landlock
def test_interpreter_that_cannot_run_confined_is_refused(tmp_path: Path, wrapper: Callable[[str], None]) -> None:
    (tmp_path / "elsewhere").write_text("true")
    wrapper(f". {tmp_path / 'elsewhere'}")  # as a library that the loader cannot open
    with pytest.raises(ConfinementError, match=r"the confined interpreter .*/bin/python ended with \d+: .*elsewhere"):
        prepare("required", str(tmp_path))
    assert "is not confined here: the confined interpreter" in prepare("best", str(tmp_path))


@needs_landlock
def test_machine_that_confines_has_no_issue() -> None:
    assert isolation_issue() is None


def test_issue_of_a_machine_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['ctypes'] = None  # as if this interpreter had no ctypes\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    issue = isolation_issue()
    assert issue is not None and issue.startswith("rollout.isolation=required: ") and "\n" not in issue


def test_readable_places_have_no_secrets_of_the_system() -> None:
    places = readable_places()
    assert not {"/", "/etc", "/proc", "/dev", "/tmp", "/home", "/root", "/var", "/run"} & set(places)
    assert os.path.expanduser("~") not in places
