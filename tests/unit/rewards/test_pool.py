import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest
from judged_answers import FIXTURES, load

from grpo_ray.errors import RewardError, VerifierError
from grpo_ray.rewards.pool import PROCESSES_VARIABLE, Verdict, VerifierPool, default_processes

HOSTILE = load(FIXTURES / "hostile.jsonl")
RIGHT = [(rf"\boxed{{{number}}}", f"${number}$") for number in range(200)]
# Math-Verify is asked whether two integrals are one, and never answers. The guard lets them pass: both sides
# have one.
HANGING = (
    r"\boxed{\int_0^1 \cos(x^{x})\sqrt{\tan(x)}\ln(\sin x+2)\,dx}",
    r"$\int_0^1 \sin(x^{x})\,dx$",
)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for a condition; the bound is for a broken build, not a timing."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_results_come_in_input_order() -> None:
    items = [(rf"\boxed{{{number % 3}}}", "$1$") for number in range(60)]
    with VerifierPool(processes=3) as pool:
        assert [verdict.reward for verdict in pool.score(items)] == [0.0, 1.0, 0.0] * 20


def test_the_hostile_batch_ends_in_time_with_every_verdict_right() -> None:
    assert len(HOSTILE) >= 150
    limit, processes = 3.0, 4
    with VerifierPool(processes=processes, limit_seconds=limit) as pool:
        pool.score(RIGHT[:8])
        before, started = resident_bytes(), time.monotonic()
        verdicts = pool.score([(row["completion"], row["solution"]) for row in HOSTILE])
        seconds, grown = time.monotonic() - started, resident_bytes() - before
        hanging = sum(verdict.status == "timeout" for verdict in verdicts)
        assert pool.counts["timeout"] == hanging
    wrong = [
        (row["id"], row["reward"], verdict)
        for row, verdict in zip(HOSTILE, verdicts, strict=True)
        if row["reward"] is not None and verdict.reward != row["reward"]
    ]
    assert wrong == []
    assert all(verdict.reward in (0.0, 1.0) for verdict in verdicts)
    assert seconds <= limit * ceil(hanging / processes) + 5.0
    assert grown < 100 << 20


def test_an_item_past_its_limit_counts_as_a_timeout_and_delays_no_other() -> None:
    with VerifierPool(processes=2, limit_seconds=1.0) as pool:
        verdicts = pool.score([*RIGHT[:20], HANGING, *RIGHT[20:40]])
        assert verdicts[20] == Verdict(0.0, "timeout")
        assert [verdict.reward for verdict in verdicts[:20] + verdicts[21:]] == [1.0] * 40
        assert pool.counts == {"ok": 40, "timeout": 1}


def test_a_worker_killed_from_outside_changes_no_verdict() -> None:
    with VerifierPool(processes=2, limit_seconds=2.0) as pool:
        pool.score(RIGHT[:4])
        assert pool.pid is not None
        hanging = pool.submit(*HANGING)
        futures = [pool.submit(*item) for item in RIGHT]
        for worker in children(pool.pid):
            os.kill(worker, signal.SIGKILL)
        assert [future.result().reward for future in futures] == [1.0] * len(RIGHT)
        assert hanging.result() == Verdict(0.0, "timeout")


def test_a_helper_killed_from_outside_changes_no_verdict() -> None:
    with VerifierPool(processes=2) as pool:
        pool.score(RIGHT[:4])
        first = pool.pid
        assert first is not None
        futures = [pool.submit(*item) for item in RIGHT]
        workers = children(first)
        os.kill(first, signal.SIGKILL)
        assert [future.result().reward for future in futures] == [1.0] * len(RIGHT)
        wait_until(lambda: not any(is_running(worker) for worker in workers))


def test_a_killed_owner_leaves_no_verifier_process_behind() -> None:
    script = f"""
import time
from grpo_ray.rewards.pool import VerifierPool
pool = VerifierPool(processes=2, limit_seconds=600)
pool.score([("\\\\boxed{{1}}", "$1$")])
pool.submit(*{HANGING!r})
print(pool.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    helper = int(owner.stdout.readline())
    wait_until(lambda: len(children(helper)) >= 1)
    workers = children(helper)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in (helper, *workers)))


def test_closing_ends_the_processes_and_what_is_open() -> None:
    pool = VerifierPool(processes=1, limit_seconds=60.0)
    pool.score(RIGHT[:1])
    helper = pool.pid
    assert helper is not None
    open_item = pool.submit(*HANGING)
    pool.close()
    pool.close()
    with pytest.raises(VerifierError, match="closed before"):
        open_item.result()
    with pytest.raises(VerifierError, match="is closed"):
        pool.submit(*RIGHT[0])
    wait_until(lambda: not is_running(helper))


def test_a_pool_works_from_a_thread_that_then_ends() -> None:
    with VerifierPool(processes=1) as pool:
        results: list[Verdict] = []
        thread = threading.Thread(target=lambda: results.extend(pool.score(RIGHT[:3])))
        thread.start()
        thread.join()
        assert [verdict.reward for verdict in results] == [1.0] * 3
        assert pool.score(RIGHT[3:5])[0].reward == 1.0


def test_nothing_starts_before_the_first_item() -> None:
    with VerifierPool(processes=1) as pool:
        assert pool.pid is None


def test_the_helper_knows_nothing_of_the_callers_main_and_sees_no_gpu() -> None:
    with VerifierPool(processes=1) as pool:
        pool.score(RIGHT[:1])
        environment = Path(f"/proc/{pool.pid}/environ").read_bytes().split(b"\0")
        maps = Path(f"/proc/{pool.pid}/maps").read_text()
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert b"OMP_NUM_THREADS=1" in environment
    assert not any(library in maps for library in ("libtorch", "_raylet", "vllm"))


def test_another_package_of_this_name_in_the_working_folder_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo_ray").mkdir()
    (tmp_path / "grpo_ray" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with VerifierPool(processes=1) as pool:
        assert pool.score(RIGHT[:1]) == [Verdict(1.0, "ok")]


def test_any_text_passes_through() -> None:
    texts = [
        "\x00" * 1000,
        "\ud800\\boxed{5}",
        "x" * (3 << 20) + r"\boxed{5}",
        "",
        "\U0010ffff",
        "\udfff" * 5,
    ]
    with VerifierPool(processes=1) as pool:
        verdicts = pool.score([(text, "$5$") for text in texts])
        odd_solution = pool.score([(r"\boxed{5}", "\ud800"), (r"\boxed{5}", "\x00")])
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert all(verdict.status == "ok" for verdict in (*verdicts, *odd_solution))


def test_workers_are_limited_in_memory_and_leave_no_core_files() -> None:
    # Math-Verify alone wants gigabytes for this one; a swallowed MemoryError leaves a plain 0.0 behind.
    greedy = (r"\boxed{(i+1)^{123456789}}", "$5$")
    with VerifierPool(processes=1, memory_bytes=512 << 20, limit_seconds=2.0, strict=False) as pool:
        future = pool.submit(*greedy)
        assert pool.pid is not None
        wait_until(lambda: len(children(pool.pid)) == 1)
        (worker,) = children(pool.pid)
        wait_until(lambda: str(512 << 20) in Path(f"/proc/{worker}/limits").read_text())
        assert future.result().reward == 0.0
        assert pool.score(RIGHT[:3]) == [Verdict(1.0, "ok")] * 3
    with pytest.raises(RewardError, match="memory_bytes"):
        VerifierPool(memory_bytes=1 << 20)


@pytest.mark.parametrize(("name", "value"), [("processes", 0), ("limit_seconds", 0.0)])
def test_settings_that_cannot_work_are_refused(name: str, value: float) -> None:
    with pytest.raises(RewardError, match=name):
        VerifierPool(**{name: value})


def test_pools_on_one_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = default_processes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_processes() == 1 <= alone
    monkeypatch.setenv(PROCESSES_VARIABLE, "7")
    assert default_processes() == 7
    monkeypatch.setenv(PROCESSES_VARIABLE, "many")
    with pytest.raises(RewardError, match="whole number"):
        default_processes()


def test_a_helper_that_cannot_start_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with VerifierPool(processes=1) as pool:
        for _ in range(2):
            with pytest.raises(VerifierError, match="3 times in a row"):
                pool.score(RIGHT[:1])
