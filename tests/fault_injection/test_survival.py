"""Tests of exactly-once: workers are killed at random, and the used problems are counted without the ledger."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import outcome_of, same
from process_watch import descendants
from small_runs import count_uses, events_of, groups_of

from grpo_ray.resilience.chaos import Fault

KILLS = ("kill-generation", "kill-backward", "kill-upload", "kill-commit")


class Killer(threading.Thread):
    """Thread that kills one worker of this process's cluster at a time with SIGKILL, at random moments of training."""

    def __init__(self, folder: Path, seed: int, kills: int):
        super().__init__(daemon=True)
        self.folder, self.kills = folder, kills
        self.draw = random.Random(seed)
        self.killed: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        for number in range(self.kills):
            # Wait until the new attempt trains: Ray ends the run if a worker dies while it starts.
            while len(self.events("training")) <= number:
                if self.over.wait(0.05):
                    return
            if self.over.wait(self.draw.uniform(0.0, 8.0)):
                return
            workers = [process for process, name in descendants(os.getpid()) if "RayTrainWorker" in name]
            if workers:
                self.killed.append(self.draw.choice(sorted(workers)))
                os.kill(self.killed[-1], signal.SIGKILL)

    def events(self, event: str) -> list[dict[str, Any]]:
        return events_of(self.folder, event) if (self.folder / "events.jsonl").exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_three_random_kills_change_nothing(small_run: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    settings = ["grpo.max_steps=30", "grpo.save_steps=4", "data.limit=50", "run.max_failures=9"]
    # One second per step leaves time for three kills. The reward that waits does not change the outcome.
    settings += [
        "rewards.functions=['correctness', 'reward_spies:wait']",
        "rewards.settings={'reward_spies:wait': {seconds: 1}}",
    ]
    small_run("whole", *settings)
    killer = Killer(tmp_path / "killed", seed, kills=3)
    killer.start()
    small_run("killed", *settings)
    killer.over.set()
    killer.join()
    assert len(killer.killed) == 3
    same(outcome_of(tmp_path / "killed"), outcome_of(tmp_path / "whole"))


@pytest.mark.slow
def test_twenty_random_runs_use_every_problem_once(
    small_run: Callable[..., Any],
) -> None:
    draw, problems, steps, per_step = random.Random(20), 18, 12, 4
    counts: Counter[str] = Counter()
    for run in range(20):
        middle = draw.randrange(3, 10)
        for first, until in ((1, middle), (middle + 1, steps)):
            workers = draw.choice([1, 2, 4])
            faults = [
                Fault(draw.choice(KILLS), draw.randint(first, until), draw.randrange(4))
                for _ in range(draw.choice([0, 1, 1, 2]))
            ]
            faults = [f if f.kind != "kill-commit" else Fault(f.kind, f.step) for f in faults]
            _, folder = small_run(
                f"run-{run}", f"cluster.num_workers={workers}", f"grpo.max_steps={until}", "grpo.save_steps=3",
                f"data.limit={problems}", "data.heldout_limit=4", "run.max_failures=9", faults=faults,
            )  # fmt: skip
            counts[f"{workers} workers"] += 1
            counts["kills"] += sum((folder / "chaos" / fault.marker).exists() for fault in faults)
        groups = groups_of(folder)
        assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, steps + 1), per_step)
        epochs = count_uses(groups)
        assert sorted(epochs) == [0, 1, 2]  # 12 steps of 4 problems: 2 epochs of 18 problems, and 12 more
        assert [len(epochs[e]) for e in (0, 1, 2)] == [18, 18, 12]
        assert all(set(epoch.values()) == {1} for epoch in epochs.values())
        assert set(epochs[0]) == set(epochs[1]) > set(epochs[2])
    print(dict(counts))
    assert counts["kills"] >= 10
    assert all(counts[f"{n} workers"] for n in (1, 2, 4))


@pytest.mark.slow
def test_killed_worker_leaves_no_verifier(small_run: Callable[..., Any], tmp_path: Path) -> None:
    mark = tmp_path / "killed.mark"
    settings = {"reward_spies:kill_once": {"step": 1, "mark": str(mark)}}
    summary, _ = small_run(
        "killed",
        "rewards.functions=['correctness', 'reward_spies:kill_once']",
        f"rewards.settings={settings}",
        "run.max_failures=2",
        "grpo.max_steps=2",
    )
    assert summary.steps == 2
    verifier = Path("/proc", mark.read_text())
    for _ in range(600):
        if not verifier.exists() or "grpo_ray" not in (verifier / "cmdline").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the verifier {verifier} outlived its worker")
