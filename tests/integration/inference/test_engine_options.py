"""Tests of arguments in `engine.vllm` on real engines of training and evaluation, and of a quantized engine."""

from pathlib import Path
from typing import Any

import pytest
from worker_tasks import call_in_worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def observed(cluster: None, policy: Path) -> dict[str, Any]:
    """Return the values that `engine_options_probe.observe` collects in a Ray task."""
    from engine_options_probe import observe

    return dict(call_in_worker(observe, str(policy)))


def test_engine_option_has_its_effect_in_training(observed: dict[str, Any]) -> None:
    assert observed["block size"] == 64
    assert observed["cached tokens"] == [0, 0, 0]  # a group shares its prompt's cache otherwise
    assert "model runner 1, quantization=int8_per_channel_weight_only, block_size=64" in observed["description"]


def test_engine_option_reaches_evaluation(observed: dict[str, Any]) -> None:
    assert "max_num_batched_tokens (16)" in observed["evaluation"]


def test_quantized_engine_takes_the_weights_of_each_sync(observed: dict[str, Any]) -> None:
    # 0.05 nats is the tolerance in 16 bits, with which a run would go on.
    assert observed["gap"] < 0.05 and observed["fresh gap"] < 0.05
    assert observed["stale gap"] > 0.5
