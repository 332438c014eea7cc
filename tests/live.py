"""Count of the bytes in live tensors, and of their maximum."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all live tensors, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out
        if not isinstance(out, tuple | list):
            tensors = [out]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).nbytes():
                self.add(storage)
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self.seen:
            return
        self.seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
