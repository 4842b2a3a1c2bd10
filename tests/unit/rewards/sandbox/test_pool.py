"""Tests of the verifier pool: order, limits, killed processes, hostile texts, isolation, and the protocol."""

import errno
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import mpmath
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_answers import FIXTURES, HANGING, OVER_LIMIT, RIGHT, load
from process_watch import children, is_running, wait_until

from grpo_ray.errors import ConfinementError, RewardError, VerifierError
from grpo_ray.processes import supervisor_client
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.landlock import landlock_version
from grpo_ray.rewards.sandbox import supervisor
from grpo_ray.rewards.sandbox.pool import PROCESSES_VARIABLE, Verdict, VerifierPool, available_cores, default_processes
from grpo_ray.rewards.sandbox.protocol import (
    ITEM,
    RESULT,
    STATUSES,
    pack_item,
    pack_result,
    unpack_items,
    unpack_results,
)
from grpo_ray.rewards.sandbox.worker import WORKER_LIMITS

HOSTILE = [row for row in load(FIXTURES / "hostile.jsonl") if row["id"] not in OVER_LIMIT]
"""The corpus without the rows that hit a limit; tests/fault_injection grades all of it."""


@pytest.fixture(scope="module")
def short_pool() -> Iterator[VerifierPool]:
    """A pool with a time limit of one second, for the tests in which it is hit."""
    with VerifierPool(processes=2, time_limit=1.0) as pool:
        yield pool


# --- verdicts


def test_pool_results_come_in_input_order(pool: VerifierPool) -> None:
    items = [(rf"\boxed{{{number % 3}}}", "$1$") for number in range(60)]
    assert [verdict.reward for verdict in pool.grade(items)] == [0.0, 1.0, 0.0] * 20


@pytest.mark.long
def test_pool_hostile_answers_get_their_rewards(pool: VerifierPool) -> None:
    assert len(HOSTILE) >= 150
    verdicts = pool.grade([(row["completion"], row["solution"]) for row in HOSTILE])
    wrong = [
        (row["id"], row["reward"], verdict)
        for row, verdict in zip(HOSTILE, verdicts, strict=True)
        if verdict.status != "ok" or (row["reward"] is not None and verdict.reward != row["reward"])
    ]
    assert wrong == []
    # A row without a reward may get either, but not None.
    assert all(verdict.reward in (0.0, 1.0) for verdict in verdicts)


def test_pool_odd_characters_and_long_text_get_verdicts(pool: VerifierPool) -> None:
    texts = ["\x00" * 1000, "\ud800\\boxed{5}", "x" * (3 << 20) + r"\boxed{5}", "", "\U0010ffff", "\udfff" * 5]
    verdicts = pool.grade([(text, "$5$") for text in texts])
    odd_solutions = pool.grade([(r"\boxed{5}", "\ud800"), (r"\boxed{5}", "\x00")])
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert all(verdict.status == "ok" for verdict in (*verdicts, *odd_solutions))


@given(texts=st.lists(st.text(st.characters()), max_size=20))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_pool_any_text_before_the_answer_passes(pool: VerifierPool, texts: list[str]) -> None:
    items = [(f"{text} {answer}", solution) for text in texts for answer, solution in RIGHT[:2]]
    assert pool.grade(items) == [Verdict(1.0, "ok")] * len(items)


# --- limits and killed processes


@pytest.mark.long
def test_pool_item_over_limit_is_counted_as_timeout(short_pool: VerifierPool) -> None:
    before = short_pool.counts.copy()
    verdicts = short_pool.grade([*RIGHT[:20], HANGING, *RIGHT[20:40]])
    assert verdicts[20] == Verdict(0.0, "timeout")
    assert verdicts[:20] + verdicts[21:] == [Verdict(1.0, "ok")] * 40
    assert short_pool.counts - before == {"ok": 40, "timeout": 1}


@pytest.mark.long
def test_pool_killed_worker_changes_no_verdict(short_pool: VerifierPool) -> None:
    short_pool.grade(RIGHT[:4])
    assert short_pool.pid is not None
    hanging = short_pool.submit(*HANGING)
    futures = [short_pool.submit(*item) for item in RIGHT]
    for worker in children(short_pool.pid):
        os.kill(worker, signal.SIGKILL)
    assert [future.result().reward for future in futures] == [1.0] * len(RIGHT)
    assert hanging.result() == Verdict(0.0, "timeout")


@pytest.mark.long
def test_pool_killed_supervisor_changes_no_verdict(short_pool: VerifierPool) -> None:
    short_pool.grade(RIGHT[:4])
    first = short_pool.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # so that no item has its result before the end
    futures = [short_pool.submit(*item) for item in RIGHT]
    workers = children(first)
    os.kill(first, signal.SIGKILL)
    assert [future.result().reward for future in futures] == [1.0] * len(RIGHT)
    assert short_pool.pid != first
    wait_until(lambda: not any(is_running(worker) for worker in workers))


class RecordingSupervisor(supervisor.Supervisor):
    """A supervisor that records the workers that it would end."""

    def __init__(self, parent: socket.socket, time_limit: float) -> None:
        super().__init__(parent, processes=1, time_limit=time_limit, memory_limit=1 << 30)
        self.ended: list[supervisor._Worker] = []

    def _handle_lost_worker(self, worker: supervisor._Worker) -> None:
        self.ended.append(worker)


class FakeTime:
    """The part of the time module that the supervisor uses, with a fixed clock."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("clock", "cpu", "is_ended"),
    [
        (2.9, 2.9, False),  # within the limit of 3 s
        (3.0, 1.0, True),  # at the limit, with a third of it in CPU time
        (3.0, 0.9, False),  # at the limit, but starved: other processes have the cores
        (11.9, 0.9, False),
        (12.0, 0.9, True),  # a starved worker gets four limits
        (12.0, 0.0, True),
    ],
)
def test_supervisor_starved_worker_gets_up_to_four_limits(
    clock: float, cpu: float, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, sock = socket.socketpair()
    with parent, sock:
        recording = RecordingSupervisor(parent, time_limit=3.0)
        worker = supervisor._Worker(pid=0, sock=sock, items=[supervisor._Item(0, b"")], cpu_before=5.0, deadline=3.0)
        recording.workers[sock.fileno()] = worker
        monkeypatch.setattr(supervisor, "time", FakeTime(clock))
        monkeypatch.setattr(supervisor, "process_usage", lambda pid: (5.0 + cpu, 0))
        recording._enforce_time_limit()
    assert recording.ended == ([worker] if is_ended else [])
    assert worker.timed_out == is_ended
    # A starved worker is checked again a tenth of the limit later.
    assert is_ended or worker.deadline == (pytest.approx(clock + 0.3) if clock >= 3.0 else 3.0)


@pytest.mark.long
def test_pool_workers_have_memory_limit_and_no_core_files() -> None:
    # Math-Verify alone needs gigabytes for this one. Its reward is 0.0 even if Math-Verify catches the MemoryError.
    exhausting = (r"\boxed{(i+1)^{123456789}}", "$5$")
    with VerifierPool(processes=1, memory_bytes=512 << 20, time_limit=2.0, strict=False) as pool:
        pool.grade(RIGHT[:1])  # a worker sets its limits before its first item
        assert pool.pid is not None
        (worker,) = children(pool.pid)
        limits = Path(f"/proc/{worker}/limits").read_text()
        assert re.search(rf"Max address space +{512 << 20} ", limits)
        assert re.search("Max core file size +0 ", limits)
        assert pool.grade([exhausting])[0].reward == 0.0
        assert pool.grade(RIGHT[:3]) == [Verdict(1.0, "ok")] * 3


# --- start and end


def test_pool_close_fails_pending_item_and_ends_supervisor() -> None:
    pool = VerifierPool(processes=2, time_limit=600.0)
    pending = pool.submit(*HANGING)
    # The other worker continues. One item at a time: with many, one would be prefetched behind the hanging item.
    assert [pool.grade([item])[0].reward for item in RIGHT[:10]] == [1.0] * 10
    assert not pending.done()
    pid = pool.pid
    assert pid is not None
    pool.close()
    pool.close()
    with pytest.raises(VerifierError, match="closed before"):
        pending.result()
    with pytest.raises(VerifierError, match="is closed"):
        pool.submit(*RIGHT[0])
    wait_until(lambda: not is_running(pid))


@pytest.mark.long
def test_pool_started_by_thread_outlives_the_thread() -> None:
    with VerifierPool(processes=1) as pool:
        results: list[Verdict] = []
        thread = threading.Thread(target=lambda: results.extend(pool.grade(RIGHT[:3])))
        thread.start()
        thread.join()
        assert [verdict.reward for verdict in results] == [1.0] * 3
        assert pool.grade(RIGHT[3:5])[0].reward == 1.0


def test_pool_without_items_starts_no_process() -> None:
    with VerifierPool(processes=1) as pool:
        assert pool.pid is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads variables and memory of a supervisor")
def test_pool_supervisor_has_no_gpu_and_no_heavy_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with VerifierPool(processes=1) as pool:
        pool.grade(RIGHT[:1])
        check_supervisor(pool)


def check_supervisor(pool: VerifierPool) -> None:
    environment = Path(f"/proc/{pool.pid}/environ").read_bytes().split(b"\0")
    maps = Path(f"/proc/{pool.pid}/maps").read_text()
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert b"OMP_NUM_THREADS=1" in environment
    assert not any(each.startswith(b"SOME_TOKEN=") for each in environment)
    assert not any(library in maps for library in ("libtorch", "_raylet", "vllm"))


@pytest.mark.long
def test_pool_ignores_package_of_same_name_in_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grpo_ray").mkdir()
    (tmp_path / "grpo_ray" / "__init__.py").write_text("raise RuntimeError('wrong package')")
    monkeypatch.chdir(tmp_path)
    with VerifierPool(processes=1) as pool:
        assert pool.grade(RIGHT[:1]) == [Verdict(1.0, "ok")]


@pytest.mark.long
def test_pool_without_a_process_left_raises_and_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with VerifierPool(processes=1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(supervisor_client, "start_child", refuse)
            with pytest.raises(VerifierError, match=r"no verifier process can be started.*temporarily unavailable"):
                pool.submit(r"\boxed{1}", "$1$")
        assert [verdict.reward for verdict in pool.grade([(r"\boxed{1}", "$1$")])] == [1.0]


def test_pool_supervisor_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with VerifierPool(processes=1) as pool:
        for _ in range(2):
            with pytest.raises(VerifierError, match="3 times in a row"):
                pool.grade(RIGHT[:1])


@pytest.mark.parametrize(("name", "value"), [("processes", 0), ("time_limit", 0.0), ("memory_bytes", 1 << 20)])
def test_pool_impossible_setting_raises(name: str, value: float) -> None:
    with pytest.raises(RewardError, match=name):
        VerifierPool(**{name: value})  # type: ignore[arg-type]


def test_default_processes_share_the_cores_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert default_processes() == available_cores() >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_processes() == 1
    monkeypatch.setenv(PROCESSES_VARIABLE, "7")
    assert default_processes() == 7
    monkeypatch.setenv(PROCESSES_VARIABLE, "many")
    with pytest.raises(RewardError, match="whole number"):
        default_processes()


# --- protocol


results = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.sampled_from(range(len(STATUSES))), st.none() | st.floats(allow_nan=False)),
    max_size=8,
)


@given(sent=results, cut=st.integers(0, 200))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_protocol_results_cut_anywhere_are_unpacked_once(sent: list, cut: int) -> None:
    stream = b"".join(pack_result(*result) for result in sent)
    buffer = bytearray(stream[:cut])
    received = unpack_results(buffer)
    assert len(buffer) < RESULT.size
    buffer += stream[cut:]
    assert received + unpack_results(buffer) == sent
    assert not buffer


@given(completion=st.text(st.characters()), solution=st.text(st.characters()), strict=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_protocol_item_of_any_text_is_unpacked(completion: str, solution: str, strict: bool) -> None:
    message = pack_item(7, completion, solution, strict)
    number, *sizes, flag = ITEM.unpack_from(message)
    assert (number, flag) == (7, strict)
    texts = message[ITEM.size :].decode("utf-8", "surrogatepass")
    assert texts == completion + solution
    assert sizes == [len(text.encode("utf-8", "surrogatepass")) for text in (completion, solution)]


pairs = st.tuples(st.text(st.characters()), st.text(st.characters()))


@given(texts=st.lists(pairs, max_size=4), cut=st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_protocol_items_cut_anywhere_are_unpacked_once(texts: list[tuple[str, str]], cut: int) -> None:
    messages = [pack_item(number, *pair, strict=True) for number, pair in enumerate(texts)]
    stream = b"".join(messages)
    buffer = bytearray(stream[:cut])
    received = unpack_items(buffer)
    buffer += stream[cut:]
    assert received + unpack_items(buffer) == list(enumerate(messages))
    assert not buffer


# --- confinement of the workers


@pytest.mark.skipif(not landlock_version(), reason="the system has no Landlock")
def test_pool_workers_are_confined_and_grade(pool: VerifierPool) -> None:
    assert pool.grade([(r"\boxed{\frac{1}{2}}", "$0.5$")]) == [Verdict(1.0, "ok")]
    assert pool.is_confined and pool.pid is not None
    for worker in children(pool.pid):
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{worker}/status").read_text().splitlines())
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
        assert int(status["CapEff"], 16) == 0
        assert re.search(r"Max processes +0 +0 ", Path(f"/proc/{worker}/limits").read_text())
    assert "Seccomp:\t0" in Path(f"/proc/{pool.pid}/status").read_text()  # the supervisor forks and kills workers


@pytest.mark.long
@pytest.mark.skipif(not landlock_version(), reason="the system has no Landlock")
def test_pool_confined_grades_with_packages_outside_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are outside of the prefix in the user's site, by `pip install --target` and in Ray's `py_modules`."""
    for package in (mpmath, sympy):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("tests"))
    monkeypatch.syspath_prepend(tmp_path)
    with VerifierPool(processes=1, time_limit=60) as pool:
        # SymPy imports `manualintegrate` and others for this one.
        assert pool.grade([(r"\boxed{\frac{1}{2}}", r"$\int_0^1 x dx$")]) == [Verdict(1.0, "ok")]
        assert pool.is_confined


@pytest.mark.skipif(not landlock_version(), reason="the system has no Landlock")
def test_prepare_confinement_in_which_nothing_grades_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LATE_IMPORTS", (r"\boxed{2}", "$1$"))  # which gets 0.0, as if it had failed
    assert supervisor.prepare_confinement() is None
    *_, line = capfd.readouterr().err.splitlines()
    assert line.endswith("not confined here: a confined process cannot read all modules that it grades with")


class NoConfinement(Confinement):
    """Confinement on a system that has none."""

    def __init__(self, read: object) -> None:
        raise ConfinementError("the kernel has no Landlock")


class RefusedConfinement(Confinement):
    """Confinement that the kernel refuses when it is applied."""

    def __init__(self, read: object) -> None:
        pass

    def apply(self, own: object, limits: object) -> None:
        raise ConfinementError("seccomp: Operation not permitted")


@pytest.mark.parametrize("make", [NoConfinement, RefusedConfinement])
def test_prepare_confinement_that_is_impossible_is_reported(
    make: type[Confinement], capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervisor.prepare_confinement(make) is None
    *_, line = capfd.readouterr().err.splitlines()
    assert line.startswith("verifier: its processes are not confined here: the kernel ")


@pytest.mark.skipif(not landlock_version(), reason="the system has no Landlock")
def test_confined_worker_reads_libraries_and_writes_nothing(tmp_path: Path) -> None:
    confinement = supervisor.prepare_confinement()
    assert confinement is not None
    (tmp_path / "secret").write_text("a")
    attempts = {
        "read": lambda: (tmp_path / "secret").read_text(),
        "write": lambda: (tmp_path / "new").write_text("a"),
        "connect": lambda: socket.socket(socket.AF_UNIX),
        "import": lambda: Path(re.__file__).read_bytes(),
    }
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            confinement.apply([], WORKER_LIMITS)
            for name, attempt in attempts.items():
                try:
                    attempt()
                    os.write(writing, f"{name} ".encode())
                except OSError:
                    continue
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as done:
        assert done.read().split() == ["import"]
    os.waitpid(child, 0)
