"""Planted faults of the weight sync in real engines: each is caught by the checksums within the step."""

from pathlib import Path
from typing import Any

import pytest
from worker_group import run_workers
from worker_tasks import call_in_worker

VARIANTS = {
    "float32": ["model.dtype=float32"],
    "bfloat16": ["model.dtype=bfloat16"],
    "bfloat16, LoRA": ["model.dtype=bfloat16", "model.lora={rank: 8, alpha: 16}"],
}

FAULTS = {
    "stale step": "checksums of ",
    "stale layer": "checksums of model.layers.1.",
    "swapped layers": "checksums of model.layers.0.",
    "swapped queries and keys": "checksums of model.layers.0.self_attn.q_proj.weight, "
    "model.layers.0.self_attn.k_proj.weight differ",
    "one bit": "checksums of model.norm.weight differ",
    "stale packed layers": "packed weights of ",
    "stale prefix cache": "keys and values of earlier prompts",
}
"""Fault -> text of its error."""


QUICK = "bfloat16, LoRA"
"""Variant that is not slow: its faults are those of the others, and one more."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[] if each == QUICK else [pytest.mark.slow]) for each in VARIANTS],
)
def observed(request: pytest.FixtureRequest, cluster: None, policy: Path) -> dict[str, Any]:
    """Return the values that `planted_sync_faults.observe_faults` collects in a Ray task."""
    from planted_sync_faults import observe_faults

    return call_in_worker(observe_faults, str(policy), VARIANTS[request.param]) | {"variant": request.param}


def test_checksums_find_every_planted_fault_and_accuse_no_right_weights(observed: dict[str, Any]) -> None:
    assert set(observed["proofs"]) == {1}  # a sync proves itself, without a further call
    errors = observed["errors"]
    assert errors.pop("none") == "" and observed["notes"] == []
    if "LoRA" in observed["variant"]:
        assert "self_attn.q_proj.weight" in errors.pop("missing adapter")
    assert errors.keys() == FAULTS.keys()
    for name, text in FAULTS.items():
        assert text in errors[name], name


def test_one_stale_step_is_below_the_tolerance_of_the_log_probabilities(observed: dict[str, Any]) -> None:
    assert observed["gaps"]["stale step"] < observed["tolerance"]  # which is why there are checksums


def test_checksums_of_a_sharded_learner_add_up_over_its_workers() -> None:
    from worker_cases import sum_shards

    for parts, whole in run_workers(sum_shards, 2):
        assert parts == whole
