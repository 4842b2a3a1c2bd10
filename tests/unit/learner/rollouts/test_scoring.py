"""Numbers that reward functions return, on their way to advantages."""

import math
from typing import Any

import pytest
import torch
from scripted_tools import tool_tokenizer
from transformers import TrainerState

from grpo_ray.learner.advantages import trl_advantages
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.rollout import Completions
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.telemetry.profiler import PhaseProfiler

NAN = math.nan


def test_infinite_rewards_do_not_apply(caplog: pytest.LogCaptureFixture) -> None:
    def ratio(**columns: Any) -> list[float | None]:
        return [1.0, math.inf, 0.0, None, -math.inf, 1e39]  # the last one is infinite in float32

    async def half(**columns: Any) -> list[float]:
        return [0.5] * 6

    scorer = Scorer(
        rewards=[Reward("ratio", ratio), Reward("half", half)], functions=("ratio", "half"),
        tokenizer=tool_tokenizer("tiny-arithmetic"), workers=Workers(gather_objects=lambda own: [own]),
        profiler=PhaseProfiler(), state=TrainerState, notify=lambda line: None,
    )  # fmt: skip
    rows = [{"id": f"{n:016x}", "prompt": [{"role": "user", "content": "1 + 1"}]} for n in range(6)]
    own = scorer.score(rows, Completions([[5]] * 6, [[5]] * 6, [[0.0]] * 6)).own
    expected = torch.tensor([[each, 0.5] for each in (1.0, NAN, 0.0, NAN, NAN, NAN)])
    torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)
    (line,) = [record.getMessage() for record in caplog.records if "infinite" in record.getMessage()]
    assert line.startswith("the reward ratio is infinite for 3 of 6 completions")
    values, _ = trl_advantages("none", "sum_then_normalize")(own[None, :, :1], torch.ones(1))
    assert values.tolist() == [[0.5, 0.0, -0.5, 0.0, 0.0, 0.0]]
