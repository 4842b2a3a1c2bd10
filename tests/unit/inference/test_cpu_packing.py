"""Tests of the choice between vLLM's packed product and torch's."""

import pytest
import torch

from grpo_ray.inference.cpu_packing import MIN_PACKED_WEIGHTS, is_faster_packed


@pytest.mark.parametrize(
    ("dtype", "rows", "faster"),
    [
        (torch.float32, MIN_PACKED_WEIGHTS - 1, False),
        (torch.float32, MIN_PACKED_WEIGHTS, True),
        (torch.bfloat16, 1, True),
        (torch.float16, 1, True),
    ],
)
def test_is_faster_packed_by_dtype_and_size(dtype: torch.dtype, rows: int, faster: bool) -> None:
    assert is_faster_packed(torch.empty(rows, 1, dtype=dtype)) is faster
