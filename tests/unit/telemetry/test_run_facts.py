"""Tests of the settings that a run's metrics are judged by."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from config_cases import examples
from hypothesis import given

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import HealthConfig
from grpo_ray.telemetry.run_facts import RunFacts, batch_sums, recorded_thresholds


def test_run_facts_are_those_of_the_config() -> None:
    config = load_config(None, ["cluster.num_workers=[2, 4]", "grpo.max_completion_length=77", "data.skip_solved=2"])
    facts = RunFacts.of(config)
    assert (facts.max_completion_length, facts.logprob_tolerance) == (77, 0.001)
    assert facts.completions_per_call == 64 and not facts.has_equal_difficulty  # 16 x 8 completions, 2 workers
    assert facts.rows_per_batch == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster.num_workers=[2, 4]", "data.skip_solved=2"],
        ["cluster.num_workers=4", "data.prefer_mixed=true"],
        ["cluster.use_gpu=true"],
        ["cluster.use_gpu=true", "model.dtype=float32"],
        ["model.dtype=bfloat16", "engine.logprob_tolerance=0.25"],
        ["grpo.steps_per_generation=2", "grpo.epochs=2", "grpo.save_steps=8"],
        ["grpo.num_iterations=4", "grpo.logging_steps=3", "grpo.save_steps=8"],
    ],
)
def test_recorded_facts_are_those_of_the_config(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    assert RunFacts.recorded(config.to_dict()) == RunFacts.of(config)


def test_recorded_thresholds_are_those_of_the_config() -> None:
    config = load_config(None, ["health.window=4", "health.no_signal=null", "health.high_kl=2.5"])
    assert recorded_thresholds(config.to_dict()) == config.health


def test_recorded_thresholds_malformed_ones_have_their_default() -> None:
    recorded = {"window": 4, "no_signal": "x", "truncation": 7.0, "sync_gap": None, "later": 1}
    expected = dataclasses.replace(HealthConfig(), window=4, sync_gap=None)
    assert recorded_thresholds({"health": recorded}) == expected
    assert recorded_thresholds({"health": 3}) == recorded_thresholds({}) == HealthConfig()


RECORDED_FIELDS = [
    *("max_completion_length", "prompts_per_step", "steps_per_generation", "epochs", "num_iterations"),
    *("logging_steps", "num_workers", "logprob_tolerance", "dtype", "use_gpu", "skip_solved"),
]
ANYTHING: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**400, -1, 0]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
FIELDS = st.sampled_from([*RECORDED_FIELDS, "window", "memory", "no_signal"])
SECTIONS = st.sampled_from(["grpo", "cluster", "model", "engine", "data", "health"])


@pytest.mark.long
@examples(200)
@given(st.dictionaries(SECTIONS, ANYTHING | st.dictionaries(FIELDS, ANYTHING, max_size=6)))
def test_recorded_facts_hostile_config_raises_nothing(config: dict[str, Any]) -> None:
    facts = RunFacts.recorded(config)
    assert facts.rows_per_batch >= 1 and facts.max_completion_length >= 1 and facts.completions_per_call > 0
    recorded_thresholds(config)


@pytest.mark.parametrize(("rows", "sums"), [(1, [1.0, 2.0, 3.0, 4.0, 5.0]), (2, [5.0, 9.0]), (5, [15.0]), (6, [])])
def test_batch_sums_end_with_the_latest_value(rows: int, sums: list[float]) -> None:
    assert batch_sums([1.0, 2.0, 3.0, 4.0, 5.0], rows) == sums
