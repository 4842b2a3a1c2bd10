"""Scores of held-out completions: which one a config has, and what rewards receive and may return."""

import math
from dataclasses import replace
from typing import Any

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError, RewardError
from grpo_ray.evaluation.confidence import normal_interval
from grpo_ray.evaluation.metrics import measurement_conditions, score_completions, summarize_evaluation
from grpo_ray.evaluation.scores import Answer, WeightedRewards, heldout_score, heldout_scores
from grpo_ray.rewards.registry import needs_solutions

GAME = "rollout.environment=package.games:Guess"
MODULE = "own_rewards"


def config_of(*overrides: str) -> Config:
    return load_config(None, list(overrides))


def problem(**columns: Any) -> Problem:
    return Problem(id="0" * 16, prompt=[{"role": "user", "content": "Write."}], solution="", columns=columns)


def answer(text: str, ids: int = 1, **fields: Any) -> Answer:
    messages = [{"role": "assistant", "content": text}]
    return Answer(text, text, ids, False, messages=messages, token_ids=list(range(ids)), **fields)


@pytest.mark.parametrize(
    ("overrides", "score", "needs"),
    [
        ([], "correctness", True),
        (["rewards.functions=[boxed_format]"], "reward", False),
        (["rewards.functions=[boxed_format, correctness]"], "correctness", True),
        (["rewards.functions=[boxed_format, cosine_length]"], "reward", True),
        (["rewards.functions=[boxed_format]", "heldout.score=correctness"], "correctness", True),
        (["heldout.score=reward"], "reward", True),
        (["rewards.functions=[boxed_format]", "heldout.score=own:f"], "own:f", False),
        ([GAME, "rewards.functions=[environment]"], "environment", False),
        ([GAME, "rewards.functions=[environment, correctness]"], "correctness", True),
        ([GAME, "rewards.functions=[environment, correctness]", "heldout.score=environment"], "environment", True),
        ([GAME, "rewards.functions=[environment, boxed_format]", "heldout.score=reward"], "reward", False),
        (["rewards.functions=['/models/judge']"], "reward", False),
        (["rewards.functions=[correctness, '/models/judge']", "heldout.score=reward"], "reward", True),
    ],
)
def test_score_follows_from_the_rewards_unless_it_is_named(overrides: list[str], score: str, needs: bool) -> None:
    config = config_of(*overrides)
    assert (config.heldout_score, config.needs_solutions) == (score, needs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["heldout.score=corectness"], r"heldout\.score=corectness must be one of .*did you mean correctness"),
        (["heldout.score=boxed_format"], r"package\.module:function"),
        (["heldout.score=environment"], r"rollout\.environment is null"),
    ],
)
def test_score_that_the_run_does_not_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


@pytest.mark.parametrize("name", ["count_words", "answer_with", "tokens", "Level"])
def test_own_function_with_a_parameter_solution_needs_solutions(name: str) -> None:
    needs = name in ("count_words", "answer_with")
    assert needs_solutions(config_of(f"rewards.functions=['{MODULE}:{name}']")) == needs
    assert needs_solutions(config_of("rewards.functions=[boxed_format]", f"heldout.score={MODULE}:{name}")) == needs


def test_reward_score_is_the_weighted_sum_of_all_that_apply() -> None:
    functions = [f"{MODULE}:{name}" for name in ("count_words", "tokens", "Level")]
    config = config_of(
        f"rewards.functions={functions}", "grpo.reward_weights=[1.0, 0.5, 10.0]",
        f"rewards.settings={{'{MODULE}:tokens': {{share: 2.0}}}}",
    )  # fmt: skip
    problems = [problem(level=1), problem(level=2), problem(level=3)]
    answers = [answer("a b", 4), answer("", 6), answer("a", 1, is_unscorable=True)]
    assert heldout_score(config)(problems, answers) == [2 + 4 + 10, 6 + 20, None]
    # Each measurement has rewards of its own: their state is not that of training.
    assert heldout_score(config)(problems, answers) == [16, 26, None]
    assert heldout_score(config)([], []) == []


def test_completion_without_any_reward_has_no_score() -> None:
    score = heldout_score(config_of(f"rewards.functions=['{MODULE}:count_words']"))
    assert score([problem(), problem()], [answer(""), answer("a")]) == [None, 1.0]


def test_own_score_has_the_settings_of_the_same_reward() -> None:
    settings = f"rewards.settings={{'{MODULE}:tokens': {{share: 3.0}}}}"
    config = config_of(f"rewards.functions=['{MODULE}:tokens']", settings, f"heldout.score={MODULE}:tokens")
    assert heldout_score(config)([problem()], [answer("a", 2)]) == [6.0]
    assert heldout_score(config_of(f"heldout.score={MODULE}:tokens"))([problem()], [answer("a", 2)]) == [2.0]


def test_environments_reward_is_limited_to_a_share() -> None:
    score = heldout_score(config_of(GAME, "rewards.functions=[environment]"))
    answers = [answer("", reward=reward) for reward in (0.5, 2.0, -1.0, None)]
    assert score([problem()] * 4, answers) == [0.5, 1.0, 0.0, None]
    assert score.is_share and not score.is_verdict


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1.0], "returned 1 rewards for 2 completions"), (1.0, "returned float for 2"), (None, "returned NoneType for 2")],
)
def test_score_with_another_number_of_rewards_raises(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward 'style' {message}"):
        WeightedRewards([lambda **kwargs: returned], ["style"], [1.0])([problem()] * 2, [answer("a")] * 2)


def test_rewards_may_return_nan_and_log_metrics_of_their_own_names() -> None:
    def style(log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_metric("style_words", 1.0)
        log_extra("words", [1, 2])
        return [math.nan, 2]

    def taken(log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("taken_mean", 1.0)
        return [0.0, 0.0]

    inputs = ([problem()] * 2, [answer("a")] * 2)
    assert WeightedRewards([style], ["style"], [1.0])(*inputs) == [None, 2.0]
    with pytest.raises(RewardError, match="is a metric of the run itself"):
        WeightedRewards([taken], ["taken"], [1.0])(*inputs)


def test_mean_of_any_scores_has_a_normal_interval_and_no_votes() -> None:
    config = config_of(f"rewards.functions=['{MODULE}:count_words']", "heldout.num_samples=2", "heldout.temperature=1")
    problems = [problem(), Problem(id="1" * 16, prompt=problem().prompt, solution="")]
    answers = [answer("a b c"), answer("a"), answer("a b c d e"), answer("a b c d e f g")]
    columns = score_completions(problems, answers, heldout_score(config), started=0.0)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    result = summarize_evaluation(rows, 2)
    assert result.pass_at_1 == normal_interval([2.0, 6.0]) and result.pass_at_1.value == 4.0
    assert result.pass_at_k == normal_interval([3.0, 7.0]) and result.maj_at_k is None
    assert result.measures()["accuracy"] == 4.0


def test_normal_interval_is_that_of_the_mean() -> None:
    measure = normal_interval([1.0, 2.0, 3.0, 6.0])
    half = 1.96 * math.sqrt(14 / 3) / 2  # squared deviations 4 + 1 + 0 + 9
    assert (measure.value, measure.count) == (3.0, 4)
    assert [measure.low, measure.high] == pytest.approx([3 - half, 3 + half])
    assert normal_interval([5.0]).value == 5.0 and not normal_interval([5.0]).has_interval
    assert math.isnan(normal_interval([]).value)


def test_conditions_of_a_measurement_name_what_the_score_is_computed_from() -> None:
    from grpo_ray.data.ledger import DatasetFingerprint

    fingerprint = {"heldout": DatasetFingerprint.of(["0" * 16])}

    def conditions(*overrides: str) -> Any:
        return measurement_conditions(fingerprint, config_of(*overrides))["heldout"]

    base = conditions()
    assert conditions("rewards.functions=[correctness, boxed_format]", "grpo.reward_weights=[1, 2]") == base
    formats = conditions("rewards.functions=[boxed_format, tag_format]")
    assert formats != base
    assert conditions("rewards.functions=[boxed_format, tag_format]", "grpo.reward_weights=[1, 2]") != formats
    assert conditions(
        "rewards.functions=[boxed_format, tag_format]", "rewards.settings={tag_format: {credit: 1.0}}"
    ) != (formats)


@pytest.mark.long
def test_each_source_of_a_mixture_has_the_score_of_its_own_rewards() -> None:
    config = config_of(
        "data.train={a: {path: arithmetic, rewards: [correctness]}, b: {path: x.jsonl, rewards: [boxed_format]}}",
        "rewards.functions=[correctness, boxed_format]", "grpo.reward_weights=[1.0, 3.0]",
    )  # fmt: skip
    assert [config.heldout_score_of(name) for name in ("a", "b", "")] == ["correctness", "reward", "correctness"]
    assert [config.needs_solutions_of(name) for name in ("a", "b")] == [True, False]
    assert [needs_solutions(config, name) for name in ("a", "b")] == [True, False]
    score = heldout_scores(config)
    problems = [replace(problem(), source=source, solution="4") for source in ("b", "a", "b", "a")]
    answers = [answer("\\boxed{4}"), answer("\\boxed{4}"), answer("4"), answer("\\boxed{5}")]
    assert score(problems, answers) == [3.0, 1.0, 0.0, 0.0]
    assert [score.of(each).is_verdict for each in problems] == [False, True, False, True]


def test_heldout_sets_of_a_mixture_are_scored_by_the_source_of_the_same_name() -> None:
    config = config_of(
        "data.train={a: {path: arithmetic, rewards: [correctness]}, b: {path: x.jsonl, rewards: [boxed_format]}}",
        "rewards.functions=[correctness, boxed_format]", "data.heldout={b: y.jsonl, other: gsm8k}",
    )  # fmt: skip
    assert [config.source_of(key) for key in config.heldout_keys] == ["b", ""]
    assert config.heldout_score == "reward"  # of the primary set
