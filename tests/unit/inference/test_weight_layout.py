"""Tests of the recorder of a loader's copies and of the layout that it observes."""

import pytest
import torch

from grpo_ray.errors import SyncError
from grpo_ray.inference.weight_layout import LoadRecorder, Recorded, Region, WeightLayout


def part_of(weight: str, start: int, length: int, parameter: str, stored: int) -> Region:
    """Return the region of consecutive elements of a weight in one dimension."""
    return Region(weight, parameter, (length,), (1,), start, (1,), stored)


def layout(regions: tuple[Region, ...], weights: dict[str, int], parameters: dict[str, int]) -> WeightLayout:
    return WeightLayout.of([Recorded(regions, weights, parameters)], rank=0)


def test_weight_that_no_parameter_copies_is_unproven() -> None:
    regions = (part_of("kept", 0, 4, "p", 0),)
    found = layout(regions, {"kept": 4, "lost": 4}, {"p": 4})
    assert found.unproven == {"lost": "no parameter of the engine is a copy of it"}
    assert found.places == {"kept": ("p",)} and found.replicas == {"kept": 1}


def test_weight_of_which_the_engine_has_a_part_raises() -> None:
    with pytest.raises(SyncError, match="of 4 elements of w only 2 were copied into the engine"):
        layout((part_of("w", 0, 2, "p", 0),), {"w": 4}, {"p": 2})


def test_weight_whose_parts_overlap_is_unproven() -> None:
    regions = (part_of("w", 0, 3, "p", 0), part_of("w", 1, 3, "q", 0))
    found = layout(regions, {"w": 4}, {"p": 3, "q": 3})
    assert found.unproven == {"w": "its parts in the engine overlap, or are not all copies of it"}
    assert found.regions == ()


def test_load_recorder_copy_of_no_elements_is_no_region() -> None:
    """A rank without rows of a weight would otherwise record a part at the place of the next one."""
    parameter = torch.zeros(4)
    recorder = LoadRecorder({"fused": parameter})
    for _, weight in recorder.watch([("part", torch.ones(4))]):
        with recorder:
            parameter[:0].copy_(weight[:0])
    assert recorder.recorded().regions == ()
