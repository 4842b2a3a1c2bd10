"""Collective operations of the workers that take a step together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpo_ray.distributed import all_gather_object

if TYPE_CHECKING:
    from accelerate import Accelerator

K = TypeVar("K")
V = TypeVar("V")


def _no_wait() -> None:
    """Do nothing: a single worker has no others to wait for."""


def _one_row(own: torch.Tensor) -> torch.Tensor:
    return own[None]


@dataclass(frozen=True)
class Workers:
    """Workers of a run. Its functions are collective: every worker must make the same calls in the same order.

    The defaults are those of a single worker.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gather: Callable[[torch.Tensor], torch.Tensor] = _one_row
    """Gather each worker's (N,) to (workers, N)."""
    gather_objects: Callable[[Any], list[Any]] = all_gather_object
    """Gather each worker's object to a list by rank."""
    wait: Callable[[], None] = _no_wait
    """Wait for all workers."""

    @staticmethod
    def of(accelerator: "Accelerator") -> "Workers":
        """Return the workers of an accelerator's process group."""
        count: int = accelerator.num_processes
        return Workers(
            rank=accelerator.process_index,
            count=count,
            device=accelerator.device,
            gather=lambda own: accelerator.gather(own).view(count, -1),
            wait=accelerator.wait_for_everyone,
        )

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a scalar over the workers."""
        return self.gather(value.view(1)).sum()

    def exchange(self, given: Mapping[K, V]) -> dict[K, V]:
        """Merge the mappings of all workers, and return the result on each of them."""
        return {key: value for entries in self.gather_objects(dict(given)) for key, value in entries.items()}
