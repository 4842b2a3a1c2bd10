"""Tests of real dedicated engines: vLLM in Ray actors, with a real learner in one process."""

from pathlib import Path
from typing import Any

import pytest
from worker_tasks import call_in_worker

from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.resilience.gpu_driver import cuda_of_torch

DEDICATED = "engine.placement=dedicated"
LORA = ("model.lora={rank: 4, target_modules: [q_proj, v_proj, up_proj]}", "engine.adapter=request")


def in_task(name: str, *arguments: str, **variables: str) -> Any:
    """Call a function of `dedicated_probe` in a Ray task with the environment of a worker, and further variables."""
    import dedicated_probe

    return call_in_worker(getattr(dedicated_probe, name), *arguments, **variables)


@pytest.fixture(scope="module")
def colocated(cluster: None, policy: Path) -> list[Any]:
    return in_task("observe_steps", str(policy))


@pytest.fixture(scope="module")
def observed(cluster: None, policy: Path) -> dict[str, Any]:
    return in_task("observe_engines", str(policy))


@pytest.mark.slow
def test_one_engine_equals_colocated_bit_for_bit(colocated: list[Any], policy: Path) -> None:
    dedicated = in_task("observe_steps", str(policy), DEDICATED)
    assert dedicated == colocated
    assert dedicated[0] != dedicated[1]  # the second version of the weights has arrived


def test_shards_do_not_depend_on_the_number_of_engines(observed: dict[str, Any]) -> None:
    assert observed["one engine"][0] == [0] and observed["two engines"][0] == [0, 1]
    assert observed["one engine"][1] == observed["two engines"][1]


@pytest.mark.slow
def test_shards_have_the_completions_of_a_whole_batch(observed: dict[str, Any], colocated: list[Any]) -> None:
    ids, logps = zip(*observed["one engine"][1], strict=True)
    assert list(ids) == [ids for ids, _ in colocated[0]]
    for own, (_, whole) in zip(logps, colocated[0], strict=True):
        assert own == pytest.approx(whole, abs=1e-5)  # another batch, so another order of additions


def test_engine_with_a_stale_layer_is_refused(observed: dict[str, Any]) -> None:
    assert "does not hold the learner's weights" in observed["changed layer"]
    assert "down_proj" in observed["changed layer"]


def test_engine_is_described_with_its_number_and_nodes(observed: dict[str, Any]) -> None:
    assert observed["description"].startswith("1 dedicated on 1 node, vLLM ")


@pytest.mark.slow
def test_engine_that_keeps_its_cache_is_refused(cluster: None, policy: Path) -> None:
    assert "keys and values of earlier prompts" in in_task("observe_kept_cache", str(policy))


@pytest.mark.slow
def test_engine_of_two_processes_has_the_same_completions(colocated: list[Any], policy: Path) -> None:
    shared = in_task("observe_steps", str(policy), DEDICATED, "engine.tensor_parallel_size=2")
    for own, whole in zip(shared, colocated, strict=True):
        assert [ids for ids, _ in own] == [ids for ids, _ in whole]


@pytest.mark.slow
def test_requested_adapter_equals_colocated_bit_for_bit(cluster: None, policy: Path) -> None:
    assert in_task("observe_steps", str(policy), DEDICATED, *LORA) == in_task("observe_steps", str(policy), *LORA)


@pytest.mark.slow
@pytest.mark.skipif(cuda_of_torch() is not None, reason="the installed torch computes on real GPUs")
@pytest.mark.parametrize("processes", [1, 2])
def test_broadcast_weights_equal_stored_ones(cluster: None, policy: Path, processes: int) -> None:
    """Compare both transports on logical GPUs, with Gloo in place of NCCL; the second version is broadcast."""
    settings = [
        DEDICATED,
        "cluster.use_gpu=true",
        "model.dtype=float32",
        f"engine.tensor_parallel_size={processes}",
        "engine.replicas=1",
    ]
    stored = in_task("observe_steps", str(policy), *settings, **{LOGICAL_GPUS: "4"})
    assert in_task("observe_steps", str(policy), *settings, "engine.transport=nccl", **{LOGICAL_GPUS: "4"}) == stored
