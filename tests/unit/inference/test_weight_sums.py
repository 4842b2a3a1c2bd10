"""Tests of checksums of weights: worked by hand, additive over parts, and different after any small change."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_ray.inference import weight_sums
from grpo_ray.inference.weight_sums import BASE, MODULUS, add_sums, contiguous_strides, shard_sum, weight_sum


def checksum(tensor: torch.Tensor) -> int:
    return add_sums([weight_sum(tensor).item()])


def by_definition(tensor: torch.Tensor) -> int:
    bits = tensor.contiguous().view(weight_sums.INTEGERS[tensor.element_size()]).flatten().tolist()
    return sum(each * BASE**i for i, each in enumerate(bits)) % MODULUS


def test_weight_sum_worked_example() -> None:
    # 1.0 in bfloat16 is 0x3f80, 2.0 is 0x4000.
    assert checksum(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == (0x3F80 + 0x4000 * BASE) % MODULUS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 7), (3, 4, 5)], ids=str)
def test_weight_sum_equals_its_definition(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = checksum(values)
    assert whole == by_definition(values)
    monkeypatch.setitem(weight_sums.CHUNK, "cpu", 8)  # several chunks
    assert checksum(values) == whole


def test_weight_sum_of_parts_adds_up() -> None:
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    parts = [weight_sum(whole[:, 4:], (10, 1), 4), weight_sum(whole[:2, :4], (10, 1), 0)]
    parts.append(weight_sum(whole[2:, :4].t().contiguous(), (1, 10), 20))  # stored in another layout
    assert add_sums([part.item() for part in parts]) == checksum(whole)


@given(first=st.integers(0, 4095), second=st.integers(0, 4095))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_weight_sum_differs_after_two_elements_change_places(first: int, second: int) -> None:
    values = torch.arange(4096.0).view(64, 64)
    swapped = values.clone().view(-1)
    swapped[first], swapped[second] = values.view(-1)[second].clone(), values.view(-1)[first].clone()
    assert (checksum(swapped.view(64, 64)) == checksum(values)) == (first == second)


@pytest.mark.parametrize("bit", range(16))
def test_weight_sum_differs_after_one_bit_changes(bit: int) -> None:
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = values.clone()
    changed.view(torch.int16)[77, 3] ^= torch.tensor(1 << bit).to(torch.int16)
    assert checksum(changed) != checksum(values)


@pytest.mark.parametrize("size", [64, 256, 1024])
def test_weight_sum_differs_after_blocks_change_places_or_all_move_by_one_bit(size: int) -> None:
    # Powers of two, in which the checksum is weakest.
    values = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert checksum(torch.cat([values[size:], values[:size]])) != checksum(values)
    for bit in (1, 1 << 14):
        assert checksum((values.view(torch.int16) ^ bit).view(torch.bfloat16)) != checksum(values)


def test_shard_sum_of_whole_weight_rounds_first() -> None:
    values = torch.randn(3, 5)
    assert shard_sum(values, torch.bfloat16).item() == weight_sum(values.bfloat16()).item()
    assert shard_sum(values).item() == weight_sum(values).item()


def sum_of_worker(rank: int, whole: torch.Tensor, placement: Replicate | Shard) -> int:
    """Return the part of a weight's checksum that one of two workers computes."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = whole.chunk(2, placement.dim)[rank] if isinstance(placement, Shard) else whole
        return shard_sum(DTensor.from_local(local, mesh, [placement], run_check=False)).item()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_shard_sum_of_two_workers_adds_up(placement: Replicate | Shard) -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert add_sums([sum_of_worker(rank, whole, placement) for rank in (0, 1)]) == checksum(whole)


def test_contiguous_strides_equal_torchs() -> None:
    assert contiguous_strides((3, 4, 5)) == torch.empty(3, 4, 5).stride() and contiguous_strides(()) == ()
