"""Tests of a sharded learner's settings and files; tests/integration/learner/test_sharding.py shards one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_ray.config.loader import load_config
from grpo_ray.learner import sharding
from grpo_ray.learner.sharding import (
    load_everywhere,
    load_optimizer,
    load_weights,
    number_files,
    save_state,
    trained_weights,
)
from grpo_ray.learner.sharding_settings import sharding_arguments
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


@pytest.fixture
def one_worker() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)])


def test_load_optimizer_weight_without_gradient_stays_without_state(tmp_path: Path, one_worker: None) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_state(tmp_path, model, optimizer)
    resumed = two_layers()
    new = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    load_weights(tmp_path, resumed)
    load_optimizer(tmp_path, resumed, new)
    for (name, mine), theirs in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs) and (mine in new.state) == (theirs in optimizer.state) == name.startswith("0")
        for part, value in optimizer.state[theirs].items():
            assert torch.equal(new.state[mine][part], value), (name, part)


def test_load_optimizer_without_a_step_has_no_state(tmp_path: Path, one_worker: None) -> None:
    """A run whose first steps were all skipped: the state must not begin with a step of its own."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    save_state(tmp_path, model, optimizer)
    load_optimizer(tmp_path, model, optimizer)
    assert not optimizer.state


def test_load_optimizer_parts_that_are_no_tensors_return(tmp_path: Path, one_worker: None) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["taken"] = 7
    save_state(tmp_path, model, optimizer)
    new = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.zero_grad()
    load_optimizer(tmp_path, model, new)
    assert new.state[model[0].weight]["taken"] == 7
    assert torch.equal(
        new.state[model[0].bias]["momentum_buffer"],
        optimizer.state[model[0].bias]["momentum_buffer"],
    )
