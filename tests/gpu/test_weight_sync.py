"""Proven weight sync in bfloat16: the gap between engine and learner, with right and with stale weights."""

from typing import Any

import pytest

VARIANTS = {
    "full": (),
    "LoRA": ("model.lora={rank: 16, alpha: 32}",),
    "sleep mode": ("grpo.vllm_enable_sleep_mode=true",),
    "LoRA, sleep mode": ("model.lora={rank: 16, alpha: 32}", "grpo.vllm_enable_sleep_mode=true"),
}
DRY_VARIANTS = ("full", "LoRA", "sleep mode")
"""Variants of the dry run. An engine on the CPU never sleeps, so "LoRA, sleep mode" would repeat "LoRA"."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", DRY_VARIANTS if metafunc.config.getoption("--dry") else VARIANTS)


def test_sync_is_proven_and_stale_weights_are_found(machine: Any, variant: str) -> None:
    observed = machine.probe("sync", *VARIANTS[variant])
    assert observed["dtype"] == "bfloat16" and observed["tolerance"] == 0.05
    assert observed["right"]["proven"] and observed["right"]["tokens"] == sum(observed["lengths"])
    assert observed["fresh"]["proven"] and observed["changed"]
    if not observed["sleeps"]:
        assert not observed["stale"][-1]["proven"]
        assert observed["stale"][-1]["mean"] > 3 * observed["right"]["mean"]


def test_sleeping_engine_leaves_its_memory_to_the_learner(machine: Any) -> None:
    awake, asleep = (machine.probe("sync", *VARIANTS[variant]) for variant in ("full", "sleep mode"))
    if machine.dry:
        assert not asleep["sleeps"]  # vLLM cannot sleep on the CPU
        return
    import torch

    assert asleep["sleeps"]
    reserved = 0.3 * torch.cuda.get_device_properties(0).total_memory  # engine.gpu_memory_utilization
    assert awake["used between generations"] - asleep["used between generations"] > 0.8 * reserved
