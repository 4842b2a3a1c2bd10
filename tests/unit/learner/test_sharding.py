"""Tests of a sharded learner's settings and files; tests/integration/learner/test_sharding.py shards one."""

import os

import pytest
import torch

from grpo_ray.config.loader import load_config
from grpo_ray.learner import sharding
from grpo_ray.learner.sharding import load_everywhere, number_files, sharding_arguments, trained_weights
from grpo_ray.learner.trl_config import trl_arguments


def test_number_files_bounds_each_workers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "FILE_BYTES", 10)
    # Two workers: 20 bytes of whole tensors in a file. 30 alone is more, and gets a file of its own.
    assert number_files({"a": 8, "b": 12, "c": 30, "d": 1, "e": 19}, workers=2) == {
        "a": 1, "b": 1, "c": 2, "d": 3, "e": 3,
    }  # fmt: skip
    assert number_files({}, workers=2) == {}


def test_sharding_arguments_users_options_do_not_change_the_format() -> None:
    arguments = sharding_arguments({"reshard_after_forward": False, "cpu_ram_efficient_loading": False})
    assert arguments["fsdp_config"] == {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
        "reshard_after_forward": False,
    }


def test_trl_arguments_sharded_in_16_bits_reduce_in_float32() -> None:
    config = load_config(None, ["cluster.shard_learner=true", "model.dtype=bfloat16"])
    policy = trl_arguments(config, "out").fsdp_plugin_args["mixed_precision_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)


def test_load_everywhere_ends_efficient_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import enable_fsdp_ram_efficient_loading

    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "")
    enable_fsdp_ram_efficient_loading()
    load_everywhere()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"


def test_trained_weights_of_an_adapter_leave_out_the_policy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert len(trained_weights(model)) == 2 + 2 + 3  # three buffers
    model[0].requires_grad_(False)
    assert set(trained_weights(model)) == {"1.weight", "1.bias"}


def test_trained_weights_share_memory_and_have_tied_ones_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    weights = trained_weights(model)
    assert set(weights) == {"0.weight"}
    weights["0.weight"].zero_()
    assert not model[1].weight.any()
