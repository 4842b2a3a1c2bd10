"""Tests of the report's rule of thumb on dedicated engines."""

from dataclasses import replace

import pytest

from grpo_ray.telemetry.placement_rule import GenerationFacts, placement_advice, recommended_staleness

FACTS = GenerationFacts(generating_share=0.6, mean_length=1000, longest=4000, max_completion_length=4096, gpus=8)


@pytest.mark.parametrize(
    ("changed", "staleness"),
    [
        ({}, 4),  # the longest has 4 times the mean
        ({"longest": 3000.0}, 2),  # exactly 3 times
        ({"max_completion_length": 1024}, 4),  # segments of 256
        ({"max_completion_length": 1023}, 2),
        ({"max_completion_length": 511}, 1),
        ({"generating_share": 0.5}, None),
        ({"generating_share": float("nan")}, None),
        ({"gpus": 1}, None),
        ({"gpus": 0}, None),
    ],
)
def test_staleness_follows_lengths_and_share(changed: dict[str, float], staleness: int | None) -> None:
    facts = replace(FACTS, **changed)  # type: ignore[arg-type]
    assert recommended_staleness(facts) == staleness
    assert (placement_advice(facts) is None) == (staleness is None)


def test_advice_names_figures_and_settings() -> None:
    assert placement_advice(FACTS) == (
        "generation takes 60 % of the time, and the longest completions have 4.0 times the mean length: consider "
        "dedicated engines (engine.placement=dedicated, rollout.max_staleness=4); grpo-ray check estimates the gain"
    )
