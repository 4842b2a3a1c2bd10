"""Tests of planned and measured GPU memory, without a GPU."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ray.config.loader import load_config
from grpo_ray.device import LOGICAL_GPU_BYTES, LOGICAL_GPUS
from grpo_ray.models.memory import GIB
from grpo_ray.training import memory_use
from grpo_ray.training.memory_use import (
    MemoryCallback,
    apply_plan,
    describe_plan,
    describe_use,
    estimated_memory,
    host_used_share,
    measure_memory,
    plan_for_workers,
)

SETTINGS = {
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "max_position_embeddings": 99,
}
GPU = ["cluster.use_gpu=true", "cluster.num_workers=1"]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy's config, on a machine with a logical GPU."""
    monkeypatch.setenv(LOGICAL_GPUS, "1")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return str(tmp_path)


@pytest.mark.parametrize("setting", ["grpo.loss_type=bnpo", "grpo.router_aux_loss_coef=0.01"])
def test_apply_plan_loss_of_one_pass_keeps_the_whole_step(policy: str, setting: str) -> None:
    config = load_config(None, [*GPU, "grpo.max_completion_length=40", setting])
    applied = apply_plan(config, plan_for_workers(config, policy))
    assert applied.grpo.tokens_per_micro_batch is None
    assert applied.sizes.micro_batch_size == config.sizes.completions_per_step


def test_apply_plan_model_with_short_context_holds_a_completion(policy: str) -> None:
    # The model supports 99 tokens, fewer than the longest completion.
    config = load_config(None, [*GPU, "data.max_prompt_length=50", "grpo.max_completion_length=256"])
    plan = plan_for_workers(config, policy)
    assert plan is not None and apply_plan(config, plan).grpo.tokens_per_micro_batch >= 306  # type: ignore[operator]


def test_plan_for_workers_without_gpus_leaves_the_config(policy: str) -> None:
    config = load_config(None, [])
    assert plan_for_workers(config, policy) is None and apply_plan(config, None) is config


def test_apply_plan_sets_open_fields_only(policy: str) -> None:
    config = load_config(None, GPU)
    plan = plan_for_workers(config, policy)
    assert plan is not None and plan.fits and plan.gpu_bytes == LOGICAL_GPU_BYTES
    planned = apply_plan(config, plan).grpo
    assert planned.trl["gradient_checkpointing"] is False  # the tiny policy has space
    assert planned.tokens_per_micro_batch == 99 * 128  # a context of 99 tokens for each completion of the step
    configured = load_config(None, [*GPU, "grpo.gradient_checkpointing=true", "grpo.micro_batch_size=16"])
    plan = plan_for_workers(configured, policy)
    assert plan is not None and apply_plan(configured, plan) == configured


def test_describe_plan_that_does_not_fit_gives_advice(policy: str) -> None:
    config = load_config(None, GPU)
    plan = plan_for_workers(config, policy)
    assert plan is not None and "may run out of memory" not in describe_plan(plan)
    small = dataclasses.replace(plan, gpu_bytes=GIB)
    assert not small.fits
    assert "may run out of memory; lower engine.gpu_memory_utilization=0.3" in describe_plan(small)


def test_describe_plan_of_dedicated_engines_advises_on_the_learner(policy: str) -> None:
    plan = plan_for_workers(load_config(None, [*GPU, "engine.placement=dedicated"]), policy)
    assert plan is not None and plan.fits
    assert estimated_memory(plan)["engine_gib"] == 0  # type: ignore[index]
    text = describe_plan(dataclasses.replace(plan, gpu_bytes=GIB // 2))
    assert "set cluster.shard_learner=true" in text and "engine.gpu_memory_utilization" not in text


def test_measure_memory_without_gpu_is_the_process() -> None:
    assert measure_memory(torch.device("cpu"))["resident_peak_gib"] > 0.01


def test_describe_use_names_estimate_and_measurement() -> None:
    measured = {"used_gib": 19.25, "total_gib": 22.0, "allocated_peak_gib": 17.0, "reserved_peak_gib": 18.5}
    assert describe_use({"used_gib": 20.04}, measured) == (
        "GPU memory: 19.2 of 22.0 GiB used, 20.0 estimated; torch's peak 17.0 allocated, 18.5 reserved"
    )


def test_memory_callback_records_after_second_step_at_checkpoints_and_at_end(policy: str) -> None:
    plan = plan_for_workers(load_config(None, GPU), policy)
    events: list[dict[str, Any]] = []
    lines: list[str] = []
    callback = MemoryCallback(plan, events.append, lines.append)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    callback.on_train_begin(on_cpu, nothing, nothing)
    recorded = []
    for _ in range(3):
        callback.on_step_end(on_cpu, nothing, nothing)
        recorded.append(len(events))
    callback.on_save(on_cpu, nothing, nothing)
    callback.on_train_end(on_cpu, nothing, nothing)
    assert (recorded, len(events)) == ([0, 1, 1], 3)
    assert events[0]["estimated"] == estimated_memory(plan) and events[0]["measured"]["resident_peak_gib"] > 0
    assert lines == []  # nothing of a GPU was measured, so there is nothing to compare


@pytest.mark.parametrize("order", [1, -1])
def test_memory_callback_takes_what_some_workers_know(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = [{"resident_peak_gib": 2.0, "host_used_share": 0.5}, {"resident_peak_gib": 3.0}][::order]
    monkeypatch.setattr(memory_use, "all_gather_object", lambda own: each)
    events: list[dict[str, Any]] = []
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    MemoryCallback(None, events.append, lambda line: None).on_save(on_cpu, nothing, nothing)
    assert events[0]["measured"] == {"resident_peak_gib": 3.0, "host_used_share": 0.5}


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("limit", "share"),
    [
        (None, 0.6),  # no control group: 600 of 1000
        ("max", 0.6),
        (str(2000 * 1024), 0.6),  # a limit above the machine's memory
        (str(500 * 1024), 0.5),  # 300 in use, of which 50 can be freed
    ],
)
def test_host_used_share_is_of_the_machine_or_the_container(tmp_path: Path, limit: str | None, share: float) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(str(300 * 1024))
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {50 * 1024}\n")
    assert host_used_share(tmp_path, tmp_path) == pytest.approx(share)


def test_host_used_share_elsewhere_is_unknown(tmp_path: Path) -> None:
    assert host_used_share(tmp_path, tmp_path) is None
