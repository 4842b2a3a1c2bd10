"""Tests of the settings of Ray Train's trainer."""

import pytest
from ray.train.torch.config import _is_backend_nccl

from grpo_ray.config.loader import load_config
from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.driver.trainer import torch_config


def test_torch_config_with_gpus_has_nccl_and_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOGICAL_GPUS, raising=False)
    config = torch_config(load_config(None, ["cluster.use_gpu=true"]))
    assert (config.backend, config.timeout_s) == ("cuda:nccl,cpu:gloo", 7200)
    assert _is_backend_nccl(config.backend)  # Ray then lets a collective that times out end the worker


def test_torch_config_on_cpu_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_config(load_config()).backend == "gloo"
    monkeypatch.setenv(LOGICAL_GPUS, "2")
    assert torch_config(load_config(None, ["cluster.use_gpu=true"])).backend == "gloo"
