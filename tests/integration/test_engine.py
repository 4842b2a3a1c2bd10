"""The real vLLM engine beside the real learner, in one process as in training (laws 1 and 4)."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seen(cluster: None, policy: Path) -> dict[str, Any]:
    import ray
    from engine_probe import look_around

    from grpo_ray.evaluate import worker_environment
    from grpo_ray.settings import load

    environment = worker_environment(load(), threads=2)
    task = ray.remote(max_calls=1)(look_around).options(runtime_env={"env_vars": environment})
    return ray.get(task.remote(str(policy)))


def test_a_completion_depends_on_its_seed_and_not_on_its_batch(seen: dict[str, Any]) -> None:
    completions, logprobs = seen["whole"]
    for other in ("backwards", "parts"):
        assert seen[other][0] == completions
        # Not to the bit: a matrix product of another height may add in another order.
        for again, first in zip(seen[other][1], logprobs, strict=True):
            assert again == pytest.approx(first, abs=1e-5)
    assert seen["other seeds"][0] != completions


def test_engine_and_learner_agree_on_every_token_sampled(seen: dict[str, Any]) -> None:
    assert seen["gap"] < 1e-4


def test_prompts_longer_together_than_one_pass_are_read_whole(seen: dict[str, Any]) -> None:
    assert sum(seen["long lengths"]) > 4096
    assert seen["long gap"] < 1e-4


def test_a_group_reads_its_prompt_once_and_nothing_that_was_measured_before(seen: dict[str, Any]) -> None:
    first, *others = seen["found in the cache"]
    assert first == 0
    assert all(seen["long lengths"][0] - found <= 32 for found in others)


def test_a_prompt_past_the_context_is_refused_with_its_length(seen: dict[str, Any]) -> None:
    assert "8192 tokens" in seen["too long"] and "engine.max_context" in seen["too long"]


def test_a_sync_brings_the_learners_new_weights_to_the_engine(seen: dict[str, Any]) -> None:
    assert seen["stale gap"] > 0.1
    assert seen["fresh gap"] < 1e-4


def test_a_sync_reaches_weights_that_the_engine_keeps_packed(seen: dict[str, Any]) -> None:
    assert seen["packed gap"] < 1e-4
    assert seen["packed stale gap"] > 0.1
    assert seen["packed fresh gap"] < 1e-4


def test_what_is_packed_is_a_copy_and_was_really_used(seen: dict[str, Any]) -> None:
    assert seen["copies gap"] < 1e-4  # although the weights that were packed are other ones by now


def test_tokens_are_drawn_as_often_as_the_learner_thinks_them_probable(seen: dict[str, Any]) -> None:
    drawn = seen["first tokens"]
    frequent = {token: p for token, p in enumerate(seen["first probabilities"]) if p * len(drawn) >= 5}
    assert len(frequent) > 3
    for token, p in frequent.items():
        assert abs(drawn.count(token) - p * len(drawn)) < 4 * (p * (1 - p) * len(drawn)) ** 0.5, token


def test_a_greedy_request_beside_others_is_greedy_and_does_not_disturb_them(seen: dict[str, Any]) -> None:
    assert seen["mixed"][:6] == seen["greedy"][:6]
    assert seen["mixed"][6:] == seen["whole"][0][6:]


def test_each_request_keeps_its_own_filter(seen: dict[str, Any]) -> None:
    for i, completion in enumerate(seen["filtered"]):
        assert completion == (seen["greedy"] if i % 4 else seen["whole"][0])[i]
    assert seen["filtered, unseeded"] == seen["greedy"]
    assert seen["greedy"] != seen["whole"][0]


def test_a_stop_string_still_ends_a_completion(seen: dict[str, Any]) -> None:
    stop, stopped, whole = seen["stopped"]
    assert any(stop in text for text in whole)
    for text, without in zip(stopped, whole, strict=True):
        assert text == "".join(without.partition(stop)[:2])


def test_a_parameter_that_the_sync_does_not_reach_is_named(seen: dict[str, Any]) -> None:
    assert "1 of the engine's" in seen["withheld"]
    assert "layers.1.mlp.down_proj" in seen["withheld"]


def test_the_proof_measures_only_sampled_tokens_and_refuses_what_is_past_the_tolerance(seen: dict[str, Any]) -> None:
    assert seen["equal"] == (0.0, 0.0, 3)
    assert seen["small"][0] == pytest.approx(0.0005, rel=1e-3)  # the tolerance in float32 is 0.001
    assert "step 7" in seen["large"] and "0.01" in seen["large"]
    assert "does not hold the learner's weights" in seen["not a number"]
