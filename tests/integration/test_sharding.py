"""Runs with a learner sharded over the workers (FSDP2); driver/test_run.py compares one with an unsharded run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import events_of, rows_of, same_weights, weights_of

from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.resilience.chaos import Fault

SHARDED = "cluster.shard_learner=true"
SETTINGS = [
    "rewards.functions=['reward_spies:vary']",
    "heldout.score=correctness",
    "grpo.learning_rate=1e-4",
    "grpo.prompts_per_step=4",
    "grpo.max_steps=3",
    "grpo.save_steps=1",
]


@pytest.mark.slow
def test_sharded_run_resumes_bit_for_bit_and_only_sharded(small_run: Callable[..., Any]) -> None:
    whole, folder = small_run("whole", *SETTINGS, SHARDED)
    killed, folder = small_run(
        "killed", *SETTINGS, SHARDED, "run.max_failures=1", faults=[Fault("kill-backward", step=3)]
    )
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert same_weights(weights_of(killed.latest_checkpoint), weights_of(whole.latest_checkpoint))
    with pytest.raises(ConfigError, match=r"cluster\.shard_learner=False differs from True.*grpo-ray export"):
        small_run("whole-again", *SETTINGS, f"run.from_checkpoint={folder}")
    with pytest.raises(ConfigError, match=r"cluster\.shard_learner=False differs"):
        small_run("killed", *SETTINGS, "grpo.max_steps=4")


@pytest.mark.slow
@pytest.mark.parametrize("spy", ["withhold_a_layer", "freeze_a_layer"])
def test_sharded_run_with_a_broken_sync_stops(small_run: Callable[..., Any], spy: str) -> None:
    with pytest.raises(TrainingError, match="SyncError"):
        small_run(
            spy.replace("_", "-"),
            SHARDED,
            f"rewards.functions=['reward_spies:{spy}']",
            "heldout.score=correctness",
            "grpo.max_steps=20",
        )


@pytest.mark.slow
def test_sharded_adapter_takes_the_same_steps(small_run: Callable[..., Any]) -> None:
    import torch
    from safetensors.torch import load_file

    weights = {}
    for shard in ("false", "true"):
        summary, folder = small_run(
            f"adapter-{shard}", *SETTINGS, "model.lora={rank: 8, alpha: 16}", f"cluster.shard_learner={shard}"
        )
        weights[shard] = load_file(Path(summary.latest_checkpoint, "adapter_model.safetensors"))
        assert max(row["engine/logprob_gap_mean"] for row in rows_of(folder)) < 1e-4
    assert weights["true"].keys() == weights["false"].keys()
    for name in weights["true"]:
        torch.testing.assert_close(weights["true"][name], weights["false"][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [SHARDED, "grpo.vllm_tensor_parallel_size=2"], ids=["learner", "engine"])
def test_requests_of_divided_workers_take_the_same_steps(small_run: Callable[..., Any], setting: str) -> None:
    import torch
    from safetensors.torch import load_file

    weights = {}
    for name, overrides in {"whole": [], "divided": [setting]}.items():
        requests = ["model.lora={rank: 8, alpha: 16}", "engine.adapter=request"]
        summary, folder = small_run(name, *SETTINGS, *requests, *overrides)
        weights[name] = load_file(Path(summary.latest_checkpoint, "adapter_model.safetensors"))
        assert max(row["engine/logprob_gap_mean"] for row in rows_of(folder)) < 1e-5
    assert weights["divided"].keys() == weights["whole"].keys()
    for name in weights["whole"]:
        torch.testing.assert_close(weights["divided"][name], weights["whole"][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_sharded_checkpoint_resumes_with_more_workers(small_run: Callable[..., Any]) -> None:
    import torch

    small_run("counts", *SETTINGS, SHARDED, "grpo.max_steps=2", "grpo.lr_scheduler_type=constant")
    changed, _ = small_run("counts", *SETTINGS, SHARDED, "cluster.num_workers=4", "grpo.lr_scheduler_type=constant")
    whole, _ = small_run("whole", *SETTINGS, "grpo.lr_scheduler_type=constant")
    weights, expected = weights_of(changed.latest_checkpoint), weights_of(whole.latest_checkpoint)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_two_workers_share_one_engine(small_run: Callable[..., Any]) -> None:
    import torch

    # What a killed worker leaves under the name that vLLM itself gives; no other engine may stumble over it.
    shared = Path("/dev/shm")
    others = set(shared.glob("*cpushm*"))  # of engines outside of these tests
    left = [file for rank in (0, 1) if not (file := shared / f"-tp:0-[0-1]-cpushm_{rank}").exists()]
    for file in left:
        file.touch()
    weights = {}
    for size in (1, 2):
        summary, folder = small_run(f"engine-{size}", *SETTINGS, f"grpo.vllm_tensor_parallel_size={size}")
        weights[size] = weights_of(summary.latest_checkpoint)
        assert max(row["engine/logprob_gap_mean"] for row in rows_of(folder)) < 1e-4
    assert not {*shared.glob("*cpushm*")} - others - set(left)
    for file in left:
        file.unlink()
    for name in weights[1]:
        torch.testing.assert_close(weights[1][name], weights[2][name], rtol=0, atol=1e-5, msg=name)
