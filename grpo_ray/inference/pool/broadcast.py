"""Weights that go from the learner to all engines at once (`engine.transport=nccl`), by a broadcast of NCCL.

Rank 0 of the learner and the processes of all engines form a process group of their own beside those of learner and
engines. Rank 0 announces names, precisions and shapes through the pool, and then broadcasts one tensor after the other.
Without GPUs, in tests, the group uses Gloo.

The group's members are the engines that run when it is formed. An engine that is started later waits for the next
version. If one is lost while weights are sent, NCCL cannot continue, so the attempt to train restarts.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from grpo_ray.inference.pool.messages import Address, Announced

TIMEOUT = timedelta(minutes=10)
"""Timeout of the group's start and of each broadcast."""


class Channel:
    """Process group of the learner's rank 0 and of the engines, from which rank 0 sends."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        """Join the group; returns once all members have.

        Args:
            rank: 0 in the learner's process.
            size: number of members.
            device: device of the tensors.
        """
        self._device = device
        own = PrefixStore("weights", store)
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group: Any = ProcessGroupNCCL(own, rank, size, options)
        else:
            self._group = ProcessGroupGloo(own, rank, size, TIMEOUT)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast weights, in the order of their announcement."""
        for _, weight in weights:
            self._broadcast(weight.detach().to(self._device).contiguous())
        self._wait()

    def receive(self, weights: Iterable[Announced]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight as it arrives."""
        for each in weights:
            tensor = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=self._device)
            self._broadcast(tensor)
            yield each.name, tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()  # with NCCL: the current stream waits, not the host

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def open_store() -> TCPStore:
    """Open the store of a group, in the learner's process."""
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join_store(address: Address) -> TCPStore:
    """Connect to the store of a group."""
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
