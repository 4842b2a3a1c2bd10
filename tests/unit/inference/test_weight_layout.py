"""Tests of the recorder of a loader's copies and of the layout that it observes."""

import torch

from grpo_ray.inference.weight_layout import LoadRecorder


def test_load_recorder_copy_of_no_elements_is_no_region() -> None:
    """A rank without rows of a weight would otherwise record a part at the place of the next one."""
    parameter = torch.zeros(4)
    recorder = LoadRecorder({"fused": parameter})
    for _, weight in recorder.watch([("part", torch.ones(4))]):
        with recorder:
            parameter[:0].copy_(weight[:0])
    assert recorder.recorded().regions == ()
