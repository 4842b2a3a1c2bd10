"""Packed rows: their gradient is that of padded rows up to the rounding of bfloat16."""

from typing import Any


def test_packed_gradient_is_as_near_to_float32_as_padded(machine: Any) -> None:
    observed = machine.probe("packing")
    assert observed["packs"]
    assert 0 < observed["error of padded rows"] < 0.1
    assert observed["error of packed rows"] < 1.5 * observed["error of padded rows"]
