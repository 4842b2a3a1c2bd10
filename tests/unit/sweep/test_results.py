"""Tests of the comparison of trials: the correction of p-values, and the number of comparisons that is shown."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_ray.config.schema import Config
from grpo_ray.evaluation.paired import PairedComparison, compare_paired
from grpo_ray.sweep import results as module
from grpo_ray.sweep.results import TrialResult, compare_with_best, count_pairs, holm
from grpo_ray.sweep.runner import SweepSummary
from grpo_ray.sweep.state import TrialRecord
from grpo_ray.sweep.table import print_results
from grpo_ray.sweep.trials import SweepTrial


def result(name: str, *, measured: bool = True) -> TrialResult:
    checkpoint: Any = SimpleNamespace(name=name, uri=f"/runs/{name}") if measured else None
    return TrialResult(name=name, steps=4, checkpoint=checkpoint, value=0.5 if measured else None, measure=None)


def test_p_values_are_corrected_for_all_pairs() -> None:
    # Four trials have six pairs: 6 x 0.01, 5 x 0.02, and 4 x 0.015 = 0.06, which Holm raises to the one before.
    assert holm({"b": 0.02, "c": 0.01}, 6) == pytest.approx({"c": 0.06, "b": 0.10})
    assert holm({"b": 0.0101, "c": 0.01, "d": 0.3}, 6) == pytest.approx({"c": 0.06, "b": 0.06, "d": 1.0})
    assert holm({}, 0) == {}


def test_every_measured_trial_might_have_been_the_best() -> None:
    assert [count_pairs([result(name) for name in names]) for names in ("", "a", "ab", "abcd")] == [0, 0, 1, 6]
    assert count_pairs([result("a"), result("b"), result("c", measured=False)]) == 1


def test_ranking_corrects_for_the_pairs_that_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six problems that only the best trial solves: p is 2/2^6 = 1/32, and with four trials 6/32."""
    solved, failed = ({str(number): [verdict] for number in range(6)} for verdict in (1.0, 0.0))

    def compare(before: Any, after: Any, key: str) -> PairedComparison | None:
        return compare_paired(failed, solved) if before.name == "b" else None  # others have no records

    monkeypatch.setattr(module, "compare_checkpoints", compare)
    found = compare_with_best([result(name) for name in "abcd"], {"a": Config()})
    assert {each.name: each.p_value for each in found} == {"a": None, "b": 6 / 32, "c": None, "d": None}
    records = {name: TrialRecord(trial=SweepTrial(name=name, overrides={})) for name in "abcd"}
    output = io.StringIO()
    print_results(SweepSummary(results=found, records=records, page=None, stopped=None), Console(file=output))
    assert "corrected for 6 pairs of trials" in output.getvalue()
