"""Tests that the methods which fault injection wraps by name exist. Without them, a planned fault would do nothing."""

import inspect
import re

from accelerate import Accelerator

from grpo_ray.inference.engine import Engine
from grpo_ray.learner.learner import Learner
from grpo_ray.learner.rollouts.scoring import Scorer
from grpo_ray.resilience import chaos
from grpo_ray.storage.checkpoint_upload import CheckpointUploader

OWNERS = {
    "learner": Learner,
    "learner.engine": Engine,
    "learner.accelerator": Accelerator,
    "learner.collector.scorer": Scorer,
    "CheckpointUploader": CheckpointUploader,
}
"""Expression in `FaultInjector.install` -> its class."""


def test_fault_injector_wraps_existing_methods() -> None:
    wrapped = re.findall(r'_wrap\(([\w.]+), "(\w+)"', inspect.getsource(chaos.FaultInjector.install))
    assert len(wrapped) == 9
    missing = [f"{owner}.{name}" for owner, name in wrapped if not callable(getattr(OWNERS[owner], name, None))]
    assert missing == [], "these methods were renamed; rename them in FaultInjector.install too"


def test_fault_injector_uses_existing_attributes() -> None:
    assert {"metrics"} <= set(CheckpointUploader.__dataclass_fields__)
    # The fault kill-generation replaces the last argument.
    assert list(inspect.signature(Engine.run_requests).parameters)[-1] == "on_finished"
