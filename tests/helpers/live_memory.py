"""Count of the bytes that tensors occupy while a block of code runs, at each moment and at the peak.

Sees every operation of torch below autograd, so it counts what a GPU's allocator would be asked for; kernels' own
workspaces are not seen.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Counter of the memory that is allocated inside of a `with` block.

    Args:
        existing: tensors allocated before, such as parameters, which are not counted.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._kept_existing = list(existing)
        self._storages: dict[int, weakref.finalize | None] = {
            tensor.untyped_storage()._cdata: None for tensor in self._kept_existing
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_iter(outputs):
            if isinstance(output, torch.Tensor):
                self._count(output.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = weakref.finalize(storage, self._release, key, size)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _release(self, key: int, size: int) -> None:
        del self._storages[key]
        self.current -= size
