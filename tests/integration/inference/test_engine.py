"""Tests of a real vLLM engine and a real learner in one process, as in training: seeds, weight sync and its proof."""

from pathlib import Path
from typing import Any

import pytest
from worker_tasks import call_in_worker


@pytest.fixture(scope="module")
def observed(cluster: None, policy: Path) -> dict[str, Any]:
    """Return the values that `engine_probe.observe` collects in a Ray task."""
    from engine_probe import observe

    return dict(call_in_worker(observe, str(policy)))


def test_engine_completion_depends_on_seed_not_on_batch(observed: dict[str, Any]) -> None:
    completions, logprobs = observed["whole"]
    for variant in ("reversed", "parts"):
        assert observed[variant][0] == completions
        # Not bitwise: a matrix product with a different number of rows may add in a different order.
        for again, first in zip(observed[variant][1], logprobs, strict=True):
            assert again == pytest.approx(first, abs=1e-5)
    assert observed["other seeds"][0] != completions


def test_engine_logprobs_equal_learner(observed: dict[str, Any]) -> None:
    assert observed["gap"] < 1e-4


def test_engine_prompts_longer_than_one_pass_are_read_completely(observed: dict[str, Any]) -> None:
    assert sum(observed["long lengths"]) > 4096
    assert observed["long gap"] < 1e-4


def test_engine_group_shares_only_its_own_prompt_cache(observed: dict[str, Any]) -> None:
    first, *others = observed["cached tokens"]
    assert first == 0
    assert all(observed["long lengths"][0] - cached <= 32 for cached in others)


def test_engine_prompt_longer_than_context_raises_with_length(observed: dict[str, Any]) -> None:
    assert "8192 tokens" in observed["too long"] and "engine.max_model_len" in observed["too long"]


def test_engine_sync_brings_new_weights(observed: dict[str, Any]) -> None:
    assert observed["stale gap"] > 0.1
    assert observed["fresh gap"] < 1e-4


def test_engine_sync_empties_the_prefix_cache(observed: dict[str, Any]) -> None:
    assert observed["long fresh gap"] < 1e-4


def test_engine_sync_reaches_packed_weights(observed: dict[str, Any]) -> None:
    assert observed["packed gap"] < 1e-4
    assert observed["packed stale gap"] > 0.1
    assert observed["packed fresh gap"] < 1e-4


def test_engine_uses_the_packed_copies(observed: dict[str, Any]) -> None:
    assert observed["copies gap"] < 1e-4  # although the original weights were changed afterwards


def test_engine_token_frequencies_match_learner(observed: dict[str, Any]) -> None:
    tokens = observed["first tokens"]
    frequent = {token: p for token, p in enumerate(observed["first probabilities"]) if p * len(tokens) >= 5}
    assert len(frequent) > 3
    for token, p in frequent.items():
        assert abs(tokens.count(token) - p * len(tokens)) < 4 * (p * (1 - p) * len(tokens)) ** 0.5, token


def test_engine_greedy_and_sampled_requests_mix(observed: dict[str, Any]) -> None:
    assert observed["mixed"][:6] == observed["greedy"][:6]
    assert observed["mixed"][6:] == observed["whole"][0][6:]


def test_engine_each_request_keeps_its_own_filter(observed: dict[str, Any]) -> None:
    for i, completion in enumerate(observed["filtered"]):
        assert completion == (observed["greedy"] if i % 4 else observed["whole"][0])[i]
    assert observed["filtered, unseeded"] == observed["greedy"]
    assert observed["greedy"] != observed["whole"][0]


def test_engine_stop_string_ends_completion(observed: dict[str, Any]) -> None:
    stop, stopped, whole = observed["stopped"]
    assert any(stop in text for text in whole)
    for text, without in zip(stopped, whole, strict=True):
        assert text == "".join(without.partition(stop)[:2])


def test_engine_sync_misses_parameter_raises_with_name(observed: dict[str, Any]) -> None:
    assert "did not reach 1 of the engine's" in observed["withheld"]
    assert "layers.1.mlp.down_proj" in observed["withheld"]


def test_prove_sync_above_tolerance_raises(observed: dict[str, Any]) -> None:
    assert observed["equal"] == (0.0, 0.0, 3)
    assert observed["small"][0] == pytest.approx(0.0005, rel=1e-3)  # the tolerance in float32 is 0.001
    assert "step 7" in observed["large"] and "0.01" in observed["large"]
    assert "does not hold the learner's weights" in observed["not a number"]


def test_engine_shared_by_workers_generates_once_all_have_arrived(tmp_path: Path) -> None:
    from worker_cases import drain_collectives
    from worker_group import run_workers

    assert run_workers(drain_collectives, 2, str(tmp_path)) == [True, True]
