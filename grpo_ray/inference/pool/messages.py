"""Messages between workers, pool and engines. Imports no heavy library: the pool's process needs none."""

from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True)
class EngineRequest:
    """One request for a completion."""

    prompt: list[int]
    """(P,) token ids."""
    sampling: dict[str, Any]
    """Arguments of `vllm.SamplingParams`, with the request's own seed."""


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a started engine."""

    description: str
    max_model_len: int
    vocabulary_size: int
    node: str
    """Address of its node."""


@dataclass(frozen=True)
class Announced:
    """A weight that is about to be broadcast."""

    name: str
    dtype: str
    """Name of its precision in torch."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Announcement:
    """Version of the weights that is about to be broadcast."""

    group: str
    """Name of the process group. Another attempt has another group, even with the same engines."""
    store: Address
    """Address of the group's store, in the learner's process."""
    members: tuple[int, ...]
    """Incarnations of the engines that receive it, in the order of their ranks in the group."""
    size: int
    """Processes of the group."""
    weights: tuple[Announced, ...]
