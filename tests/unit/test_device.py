"""Tests of the switch that replaces GPUs by the CPU."""

import os

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.device import (
    ACCELERATE_DEVICE,
    LOGICAL_GPUS,
    compute_device,
    device_environment,
    logical_gpus,
    select_device,
)
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.evaluate import worker_environment


def test_compute_device_without_switch_follows_use_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOGICAL_GPUS, raising=False)
    assert compute_device(use_gpu=True) == "cuda"
    assert compute_device(use_gpu=False) == "cpu"
    assert logical_gpus() is None
    assert device_environment(use_gpu=True) == {}


def test_compute_device_with_switch_is_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGICAL_GPUS, "4")
    assert compute_device(use_gpu=True) == compute_device(use_gpu=False) == "cpu"
    assert logical_gpus() == 4


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_logical_gpus_other_text_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LOGICAL_GPUS, text)
    with pytest.raises(ConfigError, match=f"{LOGICAL_GPUS}='{text}' must be a whole number above 0"):
        logical_gpus()


def test_worker_environment_carries_switch_and_settings_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGICAL_GPUS, "2")
    assert LOGICAL_GPUS not in worker_environment(load_config())
    environment = worker_environment(load_config(None, ["cluster.use_gpu=true"]))
    assert environment[LOGICAL_GPUS] == "2"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_select_device_overrules_gpu_that_ray_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCELERATE_DEVICE, "cuda:0")
    monkeypatch.delenv(LOGICAL_GPUS, raising=False)
    select_device(use_gpu=True)
    assert os.environ[ACCELERATE_DEVICE] == "cuda:0"
    monkeypatch.setenv(LOGICAL_GPUS, "2")
    select_device(use_gpu=True)
    assert os.environ[ACCELERATE_DEVICE] == "cpu"
