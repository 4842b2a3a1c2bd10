"""Scoring of a mixture: rewards are called for the completions of their sources only, and each source has metrics."""

import math
from typing import Any

import pytest
import torch
from scripted_tools import tool_tokenizer
from transformers import TrainerState

from grpo_ray.data.problem import Problem
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.rollout import Completions
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.learner.rollouts.step_metrics import source_metrics
from grpo_ray.telemetry.profiler import PhaseProfiler

TOKENIZER = tool_tokenizer("tiny-arithmetic")
SOURCES = ("sums", "words", "sums", "games")
APPLIES = {"sums": ("number", "later"), "words": ("later",), "games": ()}


def rows_of(sources: tuple[str, ...], size: int = 1) -> list[dict[str, Any]]:
    """Return the rows of a group of each source, whose epoch is its place."""
    prompt = [{"role": "user", "content": "1 + 1"}]
    problems = [Problem(id=f"{n:016x}", prompt=prompt, solution="", source=name) for n, name in enumerate(sources)]
    return [problem.as_row(epoch, index) for epoch, problem in enumerate(problems) for index in range(size)]


def test_rewards_get_the_completions_of_their_sources(caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[str, list[Any]] = {}

    def number(id: list[str], completions: list[Any], **columns: Any) -> list[float]:
        seen["number"] = [columns["source"], id, [each[0]["content"] for each in completions]]
        return [float(int(each, 16)) for each in id]

    async def later(source: list[str], **columns: Any) -> list[float]:
        seen["later"] = source
        return [10.0 * place for place in range(len(source))]

    scorer = Scorer(
        rewards=[Reward("number", number), Reward("later", later)], functions=("number", "later"), tokenizer=TOKENIZER,
        workers=Workers(gather_objects=lambda own: [own]), profiler=PhaseProfiler(), state=TrainerState,
        notify=lambda line: None, rewards_of=APPLIES.__getitem__,
    )  # fmt: skip
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in "1234"]
    scores = scorer.score(rows_of(SOURCES), Completions([[5]] * 4, ids, [[0.0]] * 4))
    assert seen["number"] == [["sums", "sums"], [f"{n:016x}" for n in (0, 2)], ["1", "3"]]
    assert seen["later"] == ["sums", "words", "sums"]
    nan = math.nan
    expected = torch.tensor([[0.0, 0.0], [nan, 10.0], [2.0, 20.0], [nan, nan]])
    torch.testing.assert_close(scores.own, expected, equal_nan=True)
    assert "no reward function applies to problem 0000000000000003" in caplog.text


def test_source_metrics_are_those_of_all_workers() -> None:
    rows = rows_of(("sums", "words"), size=2)
    rewards = torch.tensor([[1.0, 2.0], [1.0, 2.0], [math.nan, 3.0], [math.nan, 5.0]])
    other = {
        "sums": {
            "reward_mean": (1.0, 2), "a_mean": (1.0, 2), "b_mean": (0.0, 2), "equal_share": (0, 1),
            "length_mean": (10, 2), "problems_share": (4, 0), "epoch": (7, 1),
        },
    }  # fmt: skip
    workers = Workers(count=2, gather_objects=lambda own: [own, other])
    found = source_metrics(rows, [3, 5, 7, 9], ("a", "b"), rewards, torch.tensor([1.0, 0.5]), 2, workers)
    assert found == {
        "source/sums/reward_mean": (4 + 1) / 4, "source/sums/a_mean": (2 + 1) / 4, "source/sums/b_mean": 1.0,
        "source/sums/equal_share": 0.5, "source/sums/length_mean": (8 + 10) / 4, "source/sums/problems_share": 6 / 8,
        "source/sums/epoch": 7,
        "source/words/reward_mean": 2.0, "source/words/b_mean": 4.0, "source/words/equal_share": 0.0,
        "source/words/length_mean": 8.0, "source/words/problems_share": 0.25, "source/words/epoch": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([math.nan, 1.0, 1.0], 1.0),  # a completion without a reward
        ([math.nan, 1.0, 0.0], 0.0),
        ([1.0, 1.0, 1.0 + 2**-23], 1.0),  # rounding to 32 bits
    ],
)
def test_equal_share_of_a_source_ignores_nan_and_rounding(rewards: list[float], share: float) -> None:
    workers = Workers(count=1, gather_objects=lambda own: [own])
    column = torch.tensor(rewards)[:, None]
    found = source_metrics(rows_of(("sums",), size=3), [1] * 3, ("a",), column, torch.ones(1), 3, workers)
    assert found["source/sums/equal_share"] == share


def test_single_dataset_has_no_source_metrics() -> None:
    rows = rows_of(("",), size=2)
    assert "grpo_ray_source" not in rows[0]
    assert source_metrics(rows, [1, 1], ("a",), torch.ones(2, 1), torch.ones(1), 2, Workers()) == {}
