"""Runs whose reward is a judge that never answers the same twice: kept verdicts make a killed run exact."""

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from judge_server import JudgeServer, judge_server
from small_runs import events_of, rows_of, same_weights, weights_of

from grpo_ray.resilience.chaos import Fault

STEPS = ("grpo.max_steps=3", "grpo.save_steps=1", "heldout.score=correctness")


class Moods:
    """Scores that are random, the first one of each question kept; `replays` answers with the kept ones."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.replays = False
        self._random = random.Random(7)
        self._lock = threading.Lock()

    def __call__(self, user: str, number: int) -> str:
        with self._lock:
            answer = json.dumps({"scores": [self._random.randrange(11)]})
            kept = self.first.setdefault(user, answer)
            return kept if self.replays else answer


def settings(server: JudgeServer, **others: Any) -> str:
    judge = {"base_url": server.url, "model": "judge", "rubric": "Right.", **others}
    return f"rewards.settings={json.dumps({'judge': judge})}"


@pytest.mark.slow
def test_killed_run_of_a_moody_judge_ends_with_the_same_bits(small_run: Callable[..., Any]) -> None:
    moods = Moods()
    with judge_server(moods) as server:
        options = ("rewards.functions=[judge]", settings(server), *STEPS)
        faults = [Fault("kill-backward", step=3)]
        killed, folder = small_run("killed", *options, "run.max_failures=1", faults=faults)
        assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
        asked = len(server.requests)
        assert asked == len(moods.first) == len(set(server.users))  # no question twice, not in the repeated step either
        moods.replays = True
        whole, other = small_run("whole", *options)
        assert len(server.requests) == 2 * asked
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.latest_checkpoint))
    for rows in (rows_of(folder), rows_of(other)):
        assert [row["reward/failed_share"] for row in rows if "reward/failed_share" in row]
    means = [[row["reward/mean"] for row in rows_of(each)] for each in (folder, other)]
    assert means[0] == means[1] and len(set(means[0])) > 1


@pytest.mark.slow
def test_run_with_a_judge_that_is_down_goes_on_and_counts(small_run: Callable[..., Any]) -> None:
    with judge_server(lambda user, number: 500) as server:
        options = ("rewards.functions=[judge, correctness]", settings(server, attempts=1), *STEPS)
        _, folder = small_run("down", *options, "grpo.max_steps=2")
    rows = rows_of(folder)
    assert [row["reward/failed_share"] for row in rows] == [1.0] * 2
    assert all(row["reward/correctness_mean"] == pytest.approx(row["reward/mean"]) for row in rows)
