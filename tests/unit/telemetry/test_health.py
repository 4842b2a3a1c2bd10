"""Tests of the rules on the health of a run: the step at which each warns, on series worked by hand."""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from config_cases import examples
from hypothesis import given

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import HealthConfig, WarningName
from grpo_ray.config.trl_fields import PASSED
from grpo_ray.telemetry.health import (
    LONG_WINDOW,
    MEMORY_SHARE,
    METRICS,
    RULES,
    HealthWarning,
    RunHealth,
    used_share,
)
from grpo_ray.telemetry.run_facts import RunFacts
from grpo_ray.training.metric_names import METRICS as TRL_METRICS
from grpo_ray.training.metric_names import OWN_METRICS

FACTS = RunFacts(max_completion_length=100, logprob_tolerance=0.001, completions_per_call=64)
CHANGE = 20
"""Last healthy step of the series below."""


def healthy(step: int) -> dict[str, Any]:
    """Return the row of a run that learns: fewer and fewer groups have signal, the entropy falls to a third."""
    progress = min(step / 150, 1.0)
    noise = (-1) ** step * 0.03
    return {
        "step": step,
        "reward/mean": 0.5 + 0.4 * progress + noise,
        "reward/std": 0.5 - 0.2 * progress,
        "group/equal_share": 0.3 + 0.5 * progress + noise,
        "group/distinct_share": 0.9 - 0.6 * progress,
        "completion/length_mean": 30 + 20 * progress,
        "completion/truncated_share": 0.05 + noise,
        "policy/entropy": 0.9 - 0.6 * progress,
        "policy/kl": 0.1 * progress,
        "policy/clipped_share": 0.02,
        "learner/gradient_norm": 0.5 + 10 * noise,
        "engine/ratio_mean": 1 + noise,
        "engine/logprob_gap_mean": 2e-4,
        "reward/verifier_timeouts": 0.0,
        "reward/unscorable_share": 0.0,
        "rollout/lost_share": 0.0,
        "phase/wait": 5.0 if step == 1 else 0.01,
        "step/seconds": 6.0 if step == 1 else 1.0,
    }


def warnings_of(
    rows: Sequence[Mapping[str, Any]], settings: HealthConfig | None = None, facts: RunFacts = FACTS
) -> list[HealthWarning]:
    health = RunHealth(settings or HealthConfig(), facts)
    return [warning for row in rows for warning in health.observe(row)]


def steps_of(warnings: Sequence[HealthWarning]) -> list[tuple[str, int]]:
    return [(warning.name, warning.step) for warning in warnings]


def changing(before: Mapping[str, float], after: Mapping[str, float], steps: int = 60) -> list[dict[str, Any]]:
    """Return rows with some values up to step CHANGE, and others afterwards."""
    return [{"step": step, **(before if step <= CHANGE else after)} for step in range(1, steps + 1)]


# k is the number of changed values among the latest 10.
CASES: dict[str, tuple[dict[str, float], dict[str, float], int]] = {
    "no_signal": ({"group/equal_share": 0.5}, {"group/equal_share": 1.0}, 29),  # 0.5 + 0.05 k > 0.9: k = 9
    "low_diversity": ({"group/distinct_share": 0.5}, {"group/distinct_share": 0.0}, 30),  # 0.5 - 0.05 k < 0.02: k = 10
    # 0.6 - 0.05 k is below 0.6 by 0.5 x 0.52 for k = 6; the standard error of these ten is 0.08.
    "reward_fallen": ({"reward/mean": 0.6, "reward/std": 0.52}, {"reward/mean": 0.1, "reward/std": 0.52}, 26),
    "length_growth": ({"completion/length_mean": 20.0}, {"completion/length_mean": 60.0}, 28),  # 20 + 4 k > 50: k = 8
    "truncation": ({"completion/truncated_share": 0.0}, {"completion/truncated_share": 1.0}, 23),  # 0.1 k > 0.2: k = 3
    "high_kl": ({"policy/kl": 0.01}, {"policy/kl": 2.0}, 25),  # median 1.005 for k = 5
    "ratio_drift": ({"engine/ratio_mean": 1.0}, {"engine/ratio_mean": 0.5}, 26),  # median 0.25 for k = 5, 0.5 for 6
    "clipping": ({"policy/clipped_share": 0.0}, {"policy/clipped_share": 1.0}, 26),  # 0.1 k > 0.5: k = 6
    "entropy_collapse": ({"policy/entropy": 1.0}, {"policy/entropy": 0.0}, 30),  # 1 - 0.1 k < 0.1: k = 10
    "gradient_growth": ({"learner/gradient_norm": 1.0}, {"learner/gradient_norm": 100.0}, 25),  # median 50.5 for k = 5
    "skipped_steps": ({"reward/mean": 0.5}, {"reward/mean": 0.5, "learner/skipped_steps": 1.0}, 21),
    # 32 of 64 completions: 0.05 k > 0.05: k = 2
    "verifier_timeouts": ({"reward/verifier_timeouts": 0.0}, {"reward/verifier_timeouts": 32.0}, 22),
    "unscorable": ({"reward/unscorable_share": 0.0}, {"reward/unscorable_share": 0.5}, 22),  # 0.05 k > 0.05: k = 2
    "sync_gap": ({"engine/logprob_gap_mean": 0.0}, {"engine/logprob_gap_mean": 9e-4}, 26),  # 9e-5 k > 5e-4: k = 6
    # median of the shares 0.5 for k = 5
    "data_wait": ({"phase/wait": 0.0, "step/seconds": 2.0}, {"phase/wait": 2.0, "step/seconds": 2.0}, 25),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_warns_once_at_the_step_worked_by_hand(name: str) -> None:
    before, after, step = CASES[name]
    assert steps_of(warnings_of(changing(before, after))) == [(name, step)]


@pytest.mark.parametrize("name", [*CASES, "reward_stuck"])
def test_rule_without_threshold_is_silent(name: str) -> None:
    before, after, _ = CASES.get(name, ({"reward/mean": 0.5}, {"reward/mean": 0.5}, 0))
    off: dict[str, Any] = {name: None}
    settings = dataclasses.replace(HealthConfig(), **off)
    assert warnings_of(changing(before, after, steps=300), settings) == [] or name != "reward_stuck"
    assert name not in dict(steps_of(warnings_of(changing(before, after, steps=300), settings)))


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        ("rollout/lost_share", "10 % of the completions have no score"),  # an outage of the remote sandbox
        ("reward/failed_share", "10 % of the completions have no reward from a judge or an isolated function"),
    ],
)
def test_lost_completions_are_unscorable(metric: str, what: str) -> None:
    """0.05 k > 0.05 for k = 2."""
    rows = changing({metric: 0.0}, {"reward/unscorable_share": 0.0, metric: 0.5})
    (warning,) = warnings_of(rows)
    assert (warning.name, warning.step) == ("unscorable", 22)
    assert what in warning.what


def test_fall_within_the_first_window_is_seen() -> None:
    """Whole windows begin at (0.5 + 0.05) / 2, which is only 0.225 above the end; the first half window at 0.5."""
    rows = [{"step": step, "reward/mean": 0.5 if step <= 5 else 0.05, "reward/std": 0.5} for step in range(1, 40)]
    assert steps_of(warnings_of(rows)) == [("reward_fallen", 20)]


def test_every_rule_has_a_case_a_threshold_and_a_name() -> None:
    fields = {field.name for field in dataclasses.fields(HealthConfig)} - {"window"}
    assert {*CASES, "reward_stuck", "memory"} == set(RULES) == fields == set(typing.get_args(WarningName))


def test_metrics_of_rules_are_documented() -> None:
    assert set(METRICS) - {MEMORY_SHARE} <= OWN_METRICS.keys() | TRL_METRICS.keys()


def test_healthy_run_has_no_warning() -> None:
    assert warnings_of([healthy(step) for step in range(1, 400)]) == []


def test_reward_stuck_warns_after_its_steps() -> None:
    rows = [{"step": step, "reward/mean": 0.5 + (-1) ** step * 0.1} for step in range(1, 300)]
    assert steps_of(warnings_of(rows)) == [("reward_stuck", 200)]
    assert warnings_of(rows[:199]) == []


def test_reward_stuck_rare_logging_waits_for_separate_windows() -> None:
    """Log a row for 10 steps: the first and the latest 5 windows of 10 rows part at row 100."""
    rows = [{"step": 10 * row, "reward/mean": 0.5} for row in range(1, 150)]
    assert steps_of(warnings_of(rows)) == [("reward_stuck", 1000)]


def test_reward_rules_are_off_if_problems_are_chosen_by_reward() -> None:
    facts = dataclasses.replace(FACTS, has_equal_difficulty=False)
    before, after, _ = CASES["reward_fallen"]
    assert warnings_of(changing(before, after, steps=300), facts=facts) == []


def test_no_signal_dynamic_sampling_counts_groups_trained_on() -> None:
    """Most groups that were generated have no signal, and all groups trained on have."""
    before = {"group/equal_share": 0.95, "group/signal_share": 1.0}
    assert warnings_of(changing(before, before)) == []
    after = {"group/equal_share": 1.0, "group/signal_share": 0.0}
    assert steps_of(warnings_of(changing(before, after))) == [("no_signal", 30)]  # 0.1 k > 0.9: k = 10


def test_warning_has_measurement_and_advice() -> None:
    before, after, _ = CASES["truncation"]
    (warning,) = warnings_of(changing(before, after))
    assert warning.what == (
        "30 % of the completions are cut off at the longest allowed; raise grpo.max_completion_length, or add the "
        "reward soft_overlong"
    )


def test_advice_names_existing_settings() -> None:
    text = " ".join(rule.advice for rule in RULES.values())
    named = {tuple(key.split(".")) for key in re.findall(r"\b(?:grpo|data|run|engine|model|rewards)\.\w+", text)}
    config = load_config().to_dict()
    assert len(named) > 10
    assert {(section, name) for section, name in named if name not in {*config[section], *PASSED}} == set()


def test_share_of_first_rows_counts_the_missing_ones_as_zero() -> None:
    """The mean of the first 10 rows cannot be lower, whatever follows."""
    shares = [0.5, 0.5, 1.0, 0.5]
    rows = [{"step": step, "completion/truncated_share": share} for step, share in enumerate(shares, 1)]
    (warning,) = warnings_of(rows)  # 2.0 / 10 after step 3 does not exceed 0.2, 2.5 / 10 after step 4 does
    assert warning.step == 4 and warning.what.startswith("62 % of the completions are cut off")  # 2.5 / 4


def test_warning_comes_again_after_a_whole_window_without_cause() -> None:
    """Truncated: 1 in steps 21-30, 51-60 and 62-70. 0.2 or less of the latest ten hold from step 38 and from 68 on."""
    truncated = [*range(21, 31), *range(51, 61), 62, 63, 64, 65]
    rows = [{"step": step, "completion/truncated_share": float(step in truncated)} for step in range(1, 120)]
    # 0.3 of ten at steps 23 and 53. From 68 on two or fewer of ten: 59 to 68 hold 59, 60, 62 ... 65.
    assert steps_of(warnings_of(rows)) == [("truncation", 23), ("truncation", 53)]


def test_resume_launch_judges_its_own_steps() -> None:
    """The first steps of the run stay the first values; a window of new steps passes before the first warning."""
    rows = [{"step": step, "policy/entropy": 1.0 if step <= 10 else 0.05} for step in range(1, 100)]
    health = RunHealth(HealthConfig(), FACTS)
    health.resume(40, rows[:40])
    warnings = [warning for row in rows[40:] for warning in health.observe(row)]
    assert steps_of(warnings) == [("entropy_collapse", 50)]


def test_resume_restart_of_workers_keeps_the_steps_of_the_launch() -> None:
    """The workers restart from step 45; rows 36 to 45 are those of this launch, so the warning comes at once again."""
    rows = [{"step": step, "completion/truncated_share": 1.0} for step in range(1, 100)]
    health = RunHealth(HealthConfig(), FACTS)
    health.resume(0, [])
    assert steps_of([warning for row in rows[:60] for warning in health.observe(row)]) == [("truncation", 3)]
    health.resume(45, rows[:45])
    assert steps_of([warning for row in rows[45:] for warning in health.observe(row)]) == [("truncation", 46)]


def test_resume_earlier_than_the_launch_starts_over() -> None:
    rows = [{"step": step, "completion/truncated_share": 1.0} for step in range(1, 100)]
    health = RunHealth(HealthConfig(), FACTS)
    health.resume(40, rows[:40])
    health.resume(20, rows[:20])  # the checkpoint of step 40 was damaged
    assert steps_of([warning for row in rows[20:] for warning in health.observe(row)]) == [("truncation", 23)]


@pytest.mark.parametrize("step", [1, 3, 4])
def test_resume_within_the_first_half_window_has_no_level_yet(step: int) -> None:
    """Half a window is 5 rows; step 5 is the fifth row of the run, but not of the launch."""
    rows = [{"step": step, "reward/mean": step / 10} for step in range(1, 6)]
    health = RunHealth(HealthConfig(), FACTS)
    health.resume(step, rows[:step])
    assert [warning for row in rows[step:] for warning in health.observe(row)] == []
    assert health._history.best_reward is None


def test_skipped_steps_count_of_an_earlier_attempt_is_no_warning() -> None:
    """The count continues with that of the checkpoint; 2 steps were skipped long before."""
    health = RunHealth(HealthConfig(), FACTS)
    health.resume(30, [{"step": step, "learner/skipped_steps": 2.0} for step in range(1, 31)])
    assert [warning for step in range(31, 60) for warning in health.observe({"step": step})] == []


@pytest.mark.parametrize(
    ("measured", "share"),
    [
        ({"used_gib": 78.0, "reserved_peak_gib": 70.0, "allocated_peak_gib": 60.0, "total_gib": 80.0}, 0.85),  # 60 + 8
        ({"resident_peak_gib": 3.0, "host_used_share": 0.97}, 0.97),
        ({"resident_peak_gib": 3.0}, None),
        ({"used_gib": 1.0, "reserved_peak_gib": 1.0, "allocated_peak_gib": 1.0, "total_gib": 0.0}, None),
        ({"used_gib": "x", "total_gib": 1.0}, None),
        ({}, None),
    ],
)
def test_used_share_counts_memory_that_cannot_be_freed(measured: dict[str, Any], share: float | None) -> None:
    assert used_share(measured) == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(("rows_per_batch", "seconds", "warns"), [(1, 1.0, False), (4, 1.0, False), (4, 5.0, True)])
def test_data_wait_is_a_share_of_a_generation_batch(rows_per_batch: int, seconds: float, warns: bool) -> None:
    """One row in four waits: 1 s of 1 + 3 x 1 s, a quarter; or 5 s of 5 + 3 x 1 s, more than half."""
    rows = [
        {"step": step, "phase/wait": seconds if step % 4 == 1 else 0.0, "step/seconds": seconds if step % 4 == 1 else 1}
        for step in range(1, 60)
    ]
    facts = dataclasses.replace(FACTS, rows_per_batch=rows_per_batch)
    warnings = warnings_of(rows, facts=facts)
    assert [warning.name for warning in warnings] == ["data_wait"] * warns
    assert not warns or warnings[0].what.startswith("the learner waits for problems in 62 % of the time")


def test_judgements_are_those_of_the_latest_rows_with_and_without_a_warning() -> None:
    health = RunHealth(dataclasses.replace(HealthConfig(), truncation=None), FACTS)
    health.resume(0, [healthy(step) | {"policy/kl": 0.7} for step in range(1, 60)])
    health.observe_memory({"host_used_share": 0.5})
    judgements = health.judgements()
    assert [name for name, judgement in judgements.items() if judgement.is_exceeded] == ["high_kl"]
    assert judgements["high_kl"].text == "the policy is 0.7 nats per token away from the reference"
    assert judgements["memory"].text == "50 % of the memory is in use"
    assert "truncation" not in judgements and "reward_stuck" not in judgements  # off, and too few steps
    assert set(RULES) - judgements.keys() == {"truncation", "reward_stuck"}


def test_judgements_are_none_before_the_first_row() -> None:
    assert RunHealth(HealthConfig(), FACTS).judgements() == {}


def test_memory_warns_at_its_share() -> None:
    health = RunHealth(HealthConfig(), FACTS)
    health.observe({"step": 7})
    assert health.observe_memory({"host_used_share": 0.95}) == []
    (warning,) = health.observe_memory({"host_used_share": 0.96})
    assert (warning.name, warning.step) == ("memory", 7) and warning.what.startswith("96 % of the memory is in use; ")
    assert health.observe_memory({"host_used_share": 0.99}) == [] == health.observe_memory(None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**400, -1, 0]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
HOSTILE_ROWS = st.lists(st.dictionaries(st.sampled_from(["step", *METRICS]), JSON), max_size=40)


@pytest.mark.long
@examples(300)
@given(HOSTILE_ROWS, HOSTILE_ROWS, JSON)
def test_rules_hostile_rows_raise_nothing_and_keep_little(rows: list[Any], more: list[Any], measured: Any) -> None:
    health = RunHealth(HealthConfig(window=2), FACTS)
    health.resume(3, rows)
    for row in (rows + more) * 3:
        assert all(len(warning.what) < 500 for warning in health.observe(row))
    health.observe_memory(measured)
    health.resume(1, more)
    for series in health._history._series.values():
        assert max(len(series.first), len(series.latest)) <= LONG_WINDOW * 2


@examples(50)
@given(st.lists(st.tuples(*[st.sampled_from([math.nan, math.inf, -1e300, 1e14, 0.0, 1e-320]) for _ in METRICS])))
def test_rules_extreme_numbers_raise_nothing(values: list[tuple[float, ...]]) -> None:
    rows: list[Any] = [{"step": step, **dict(zip(METRICS, row, strict=True))} for step, row in enumerate(values * 5)]
    warnings_of(rows, HealthConfig(window=2))
