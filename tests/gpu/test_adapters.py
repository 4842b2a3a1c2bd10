"""Whole runs with adapters on a GPU: merged, as requests, with a shared base, and on policies in four bits."""

from typing import Any

import pytest
from small_runs import rows_of

LORA = "model.lora={rank: 16, alpha: 32}"
FORMS = {
    "merged": (),
    "request": ("engine.adapter=request",),
    "shared": ("model.share_base=true",),
    "nf4": ("model.quantization=nf4",),
    "int4": ("model.quantization=int4",),
    "int4-asleep": ("model.quantization=int4", "grpo.vllm_enable_sleep_mode=true"),
}
"""Name -> how the engine gets the adapter, and the form of the frozen weights."""


@pytest.mark.parametrize("name", FORMS)
def test_adapter_run_proves_each_sync(machine: Any, name: str) -> None:
    settings = (LORA, "model.dtype=bfloat16", "grpo.max_steps=3", "grpo.save_steps=3")
    folder = machine.train(f"adapter-{name}", *settings, *FORMS[name])
    rows = [row for row in rows_of(folder) if "engine/logprob_gap_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 0.05
