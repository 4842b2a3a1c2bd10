"""Proof of the weight sync under every sampling option, with a real engine: neither a false alarm nor a miss."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sampling_probe import COMBINATIONS, FORM, FORMED
from worker_tasks import call_in_worker

from grpo_ray.config.sampling import PROCESSING

TOLERANCE = 1e-3
"""Default of `engine.logprob_tolerance` in float32."""
TOLERANCE_16_BITS = 0.05
"""The same in 16 bits."""


@pytest.fixture(scope="module")
def gaps(cluster: None, policy: Path) -> dict[str, dict[str, Any]]:
    """Return the observations in float32."""
    return observe(policy, "float32")


@pytest.fixture(scope="module")
def formed_gaps(cluster: None, policy: Path) -> dict[str, dict[str, Any]]:
    """Return the observations of completions of a form, in float32."""
    return observe(policy, "float32", formed=True)


def observe(policy: Path, dtype: str, formed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the observations of `sampling_probe.measure_gaps`, made in a Ray task."""
    from sampling_probe import measure_gaps

    found: dict[str, dict[str, Any]] = call_in_worker(measure_gaps, str(policy), dtype, formed)
    for name, row in found.items():  # the table of docs/architecture.md
        print(dtype, name, json.dumps({key: value for key, value in row.items() if isinstance(value, float)}))
    return found


def test_combinations_cover_every_option() -> None:
    assert {name for options in COMBINATIONS.values() for name in options} == set(PROCESSING)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_sync_proof_right_weights_no_false_alarm(gaps: dict[str, dict[str, Any]], name: str) -> None:
    assert gaps[name]["gap"] < TOLERANCE / 10 and gaps[name]["raised"] == ""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_sync_proof_stale_weights_no_miss(gaps: dict[str, dict[str, Any]], name: str) -> None:
    assert gaps[name]["stale"] > TOLERANCE and "does not hold the learner's weights" in gaps[name]["stale raised"]


@pytest.mark.slow
def test_sync_proof_in_16_bits_has_no_false_alarm_and_misses_small_moves(cluster: None, policy: Path) -> None:
    """The tolerance must allow for rounding, so that only the checksums find what moves the policy less."""
    for name, row in observe(policy, "bfloat16").items():
        assert row["gap"] < TOLERANCE_16_BITS / 2 and row["raised"] == "", name
        assert row["stale"] < TOLERANCE_16_BITS and row["stale raised"] == "", name


# The token of `logit_bias` is a rare one: its gap is 0.0003.
@pytest.mark.parametrize("name", sorted(COMBINATIONS.keys() - {"temperature only", "logit_bias"}))
def test_processed_logprobs_would_raise_a_false_alarm(gaps: dict[str, dict[str, Any]], name: str) -> None:
    assert gaps[name]["processed"] > TOLERANCE


@pytest.mark.parametrize("name", COMBINATIONS)
def test_sampling_option_same_seeds_same_completions(gaps: dict[str, dict[str, Any]], name: str) -> None:
    assert gaps[name]["again"] == gaps[name]["completions"] == gaps[name]["stale completions"]


@pytest.mark.parametrize("name", FORMED)
def test_completions_of_a_form_are_proven(formed_gaps: dict[str, dict[str, Any]], name: str) -> None:
    row = formed_gaps[name]
    assert row["gap"] < TOLERANCE / 10 and row["raised"] == ""
    assert row["stale"] > TOLERANCE and "does not hold the learner's weights" in row["stale raised"]
    assert row["again"] == row["completions"] == row["stale completions"]
    # The learner excludes what the form excludes, so that nothing is left to correct but filters.
    assert (row["processed"] > TOLERANCE) == ("filters" in name)


def is_json(text: str, kind: type = object) -> bool:
    try:
        return isinstance(json.loads(text), kind)
    except ValueError:
        return False


HAS_FORM: dict[str, Callable[[str], Any]] = {
    "regex": lambda text: re.fullmatch(FORM["regex"], text),
    "regex and filters": lambda text: re.fullmatch(FORM["regex"], text),
    "choice": lambda text: text in ("12", "345", "3456"),
    "json": lambda text: is_json(text, int) and 5 <= int(text) <= 5000,
    "any json": is_json,
    "grammar": lambda text: re.fullmatch(r"([1-4]|90)\+([1-4]|90)|[5-9]", text),
}


@pytest.mark.parametrize("name", FORMED)
def test_completions_have_their_form(formed_gaps: dict[str, dict[str, Any]], name: str) -> None:
    row = formed_gaps[name]
    pairs = zip(row["texts"], row["completions"], strict=True)
    ended = [text.replace(" ", "") for text, ids in pairs if len(ids) < 24]
    assert len(ended) >= 3 and all(map(HAS_FORM[name], ended))
