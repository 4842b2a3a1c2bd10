"""Removal of the costs that a trainer has beside its steps, for tests that build many small trainers."""

import atexit
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import accelerate.utils.modeling
import pytest
from accelerate.utils.imports import is_peft_available


@functools.cache
def freeze_imports() -> None:
    """Exclude all objects that exist now from garbage collection.

    accelerate collects garbage at the start of every training, which takes seconds over the objects that torch, Ray and
    vLLM create on import.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries report leaks at the end of the process


@contextmanager
def cheap_trainers() -> Iterator[None]:
    """Build and run trainers without repeated package look-ups, telemetry and collection of imported objects."""
    freeze_imports()
    with pytest.MonkeyPatch.context() as patch:
        # Each call reads the metadata of the installed package; accelerate calls it several times in a step.
        patch.setattr(accelerate.utils.modeling, "is_peft_available", functools.cache(is_peft_available))
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patch.setenv("CI", "1")  # TRL sends no telemetry where this is set
        yield
