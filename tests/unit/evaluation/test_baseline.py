"""Tests of the baseline: each held-out set is measured once per run, and again if its conditions change."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.baseline import (
    Baseline,
    baseline_file,
    baseline_setup,
    describe_baseline,
    measure_baseline,
)
from grpo_ray.evaluation.metrics import EvaluationResult, measurement_conditions, summarize_evaluation
from grpo_ray.storage.records.heldout_files import read_measurements
from grpo_ray.storage.run_folder import RunFolder

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n} + 1"}], solution=f"${n + 1}$") for n in range(3)
]
SETS = {"heldout/math": PROBLEMS, "heldout/gsm8k": PROBLEMS[:1]}


class Evaluator:
    """Evaluator that solves the first problem, fails the second, and cannot score the third."""

    def __init__(self) -> None:
        self.measured: list[list[str]] = []

    def __call__(self, sets: Mapping[str, list[Problem]]) -> dict[str, EvaluationResult]:
        self.measured.append(list(sets))
        rows = [{"scores": [score], "answers": [""], "truncated": [False], "seconds": 0.5} for score in (1.0, 0.0, NAN)]
        return {key: summarize_evaluation(rows[: len(problems)], 1) for key, problems in sets.items()}


NAN = float("nan")


def baseline_of(
    folder: RunFolder, sets: Mapping[str, list[Problem]], *overrides: str, policy: str = "tiny-arithmetic 0123"
) -> Baseline:
    """Return the baseline of these sets in a run folder, with overrides of the config."""
    fingerprints = {key: DatasetFingerprint.of(each.id for each in problems) for key, problems in sets.items()}
    config = load_config(None, list(overrides))
    return Baseline(folder, measurement_conditions(fingerprints, config), baseline_setup(policy))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run", 1.0)


def test_measure_baseline_second_call_measures_nothing(folder: RunFolder) -> None:
    messages: list[str] = []
    evaluator, baseline = Evaluator(), baseline_of(folder, SETS)
    for _ in range(2):
        measure_baseline(
            baseline,
            evaluator,
            SETS,
            messages.append,
            lambda results: messages.append(describe_baseline(results, "correctness")),
        )
    assert evaluator.measured == [["heldout/math", "heldout/gsm8k"]]
    assert messages == [
        "measuring the policy before training",
        "held-out accuracy before training: math 0.500, gsm8k 1.000",
    ]
    found = baseline.read()
    assert [(each["problems"], each["unscorable"]) for each in found.values()] == [(2, 1), (1, 0)]
    assert folder.exists("heldout_math_before.json") and folder.exists("heldout_gsm8k_before.json")
    (written,) = read_measurements(folder, "heldout/math")
    assert (written.file.step, written.policy) == (0, "")
    assert json.loads(written.conditions) == baseline.conditions["heldout/math"]


def test_measure_baseline_of_changed_set_keeps_the_other(folder: RunFolder) -> None:
    measure_baseline(baseline_of(folder, SETS), Evaluator(), SETS, print, print)
    changed = {"heldout/math": PROBLEMS[:2], "heldout/gsm8k": PROBLEMS[:1]}
    evaluator = Evaluator()
    assert baseline_of(folder, changed).missing() == ["heldout/math"]
    measure_baseline(baseline_of(folder, changed), evaluator, changed, print, print)
    assert evaluator.measured == [["heldout/math"]] and baseline_of(folder, changed).missing() == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("heldout.temperature=0.7", "heldout.num_samples=4"),
        ("grpo.max_completion_length=99",),
        ("grpo.generation_kwargs.stop=[END]",),
        ("grpo.chat_template_kwargs.enable_thinking=false",),
    ],
)
def test_baseline_of_other_sampling_does_not_count(folder: RunFolder, overrides: tuple[str, ...]) -> None:
    measure_baseline(baseline_of(folder, SETS), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS, *overrides).read() == {} and len(baseline_of(folder, SETS).read()) == 2


def test_baseline_of_another_policy_does_not_count(folder: RunFolder) -> None:
    """An earlier launch has measured another policy, and ended before its first checkpoint."""
    measure_baseline(baseline_of(folder, SETS, policy="tiny-tools 4567"), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS).missing() == list(SETS)
    measure_baseline(baseline_of(folder, SETS), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS).missing() == []
    assert baseline_of(folder, SETS, policy="tiny-tools 4567").read() == {}


GAME = ("rollout.environment=grpo_ray.tools.examples:Guess", "rewards.functions=[environment]")
TOOL = ("rollout.tools=['grpo_ray.tools.examples:multiply']",)
SECRET = "rollout.settings={'grpo_ray.tools.examples:Guess': {limit: 8, api_key: key-0123456789}}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GAME, (*GAME, "rollout.settings={'grpo_ray.tools.examples:Guess': {limit: 4}}")),
        (TOOL, (*TOOL, "rollout.max_turns=2")),
        (TOOL, ()),
        ((), ("rewards.strict=false",)),
    ],
    ids=["settings", "turns", "tools", "strict"],
)
def test_baseline_of_other_tools_or_grading_does_not_count(
    folder: RunFolder, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    measure_baseline(baseline_of(folder, SETS, *before), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS, *before).missing() == []
    assert baseline_of(folder, SETS, *after).missing() == list(SETS)


def test_baseline_with_a_secret_setting_is_found_again_without_it(folder: RunFolder) -> None:
    measure_baseline(baseline_of(folder, SETS, *GAME, SECRET), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS, *GAME, SECRET).missing() == []
    assert "key-0123456789" not in folder.read_text(baseline_file("heldout/math"))


@pytest.mark.parametrize(
    "override", ["rollout.time_limit=3", "rollout.max_active=2", "rewards.time_limit=9", "cluster.num_workers=1"]
)
def test_baseline_on_another_machine_counts(folder: RunFolder, override: str) -> None:
    measure_baseline(baseline_of(folder, SETS, *TOOL), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS, *TOOL, override).missing() == []


def test_baseline_with_token_ids_as_keys_is_found_again(folder: RunFolder) -> None:
    biased = ("grpo.generation_kwargs.logit_bias={5: 2.0}", "grpo.vllm_importance_sampling_mode=token_truncate")
    measure_baseline(baseline_of(folder, SETS, *biased), Evaluator(), SETS, print, print)
    assert baseline_of(folder, SETS, *biased).missing() == []  # keys of a mapping in JSON are text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_baseline_spoilt_file_is_measured_anew(folder: RunFolder, text: str) -> None:
    sets = {"heldout": PROBLEMS}
    folder.write_text(text, baseline_file("heldout"))
    assert baseline_of(folder, sets).missing() == ["heldout"]
    measure_baseline(baseline_of(folder, sets), Evaluator(), sets, print, print)
    assert baseline_of(folder, sets).missing() == []


def test_baseline_interrupted_before_its_file_is_measured_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted measurement has already written records of another policy."""
    sets = {"heldout": PROBLEMS}
    measure_baseline(baseline_of(folder, sets), Evaluator(), sets, print, print)

    def interrupt(folder: RunFolder, value: object, *names: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "write_json", interrupt)
        measure_baseline(baseline_of(folder, sets, policy="tiny-tools 4567"), Evaluator(), sets, print, print)
    assert baseline_of(folder, sets).missing() == ["heldout"]


@pytest.mark.parametrize("change", [("rewards.strict=false",), TOOL, ("rollout.function=rollouts:play",)])
def test_measurement_with_other_grading_or_tools_is_not_comparable(change: tuple[str, ...]) -> None:
    """The best checkpoint of a run that goes on with other grading is measured again for the summary."""
    fingerprints = {"heldout": DatasetFingerprint(3, "ab")}
    before, after = (measurement_conditions(fingerprints, load_config(None, list(each))) for each in ((), change))
    assert before != after


def test_describe_baseline_of_only_set_has_no_name() -> None:
    results = Evaluator()({"heldout": PROBLEMS})
    assert describe_baseline(results, "correctness") == "held-out accuracy before training: 0.500"
    assert describe_baseline(results, "reward") == "held-out score before training: 0.500"
