"""Activations that wait in the host's memory between the two passes, with `parallel.offload`.

What a sub-layer keeps for its backward pass is copied to pinned memory when its forward pass ends, while the next
sub-layer computes. At the end of that one the computing stream waits for the copies, and the device's memory is free.
They come back while the sub-layer after it runs backward: the gradient of what that one puts out starts the copies, and
the first tensor that is asked for waits for them. So beside what a sub-layer works with, that of one other is there.

Each storage is copied once, whole, however many views of it are kept, and comes back bit by bit. What stays is small,
or no number, or a weight, or the stream that another pipeline stage sent, which the schedule holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybridtron.device import beside_computing, compute_device, wait_for

SMALLEST = 2**20  # bytes: what is smaller stays


class _Storage:
    """One that is kept: on the device, on the host, or on the device again. It lives as long as a node needs it."""

    def __init__(self, owner: OffloadedSublayer, flat: Tensor) -> None:
        self.owner, self.flat = owner, flat


class _View(NamedTuple):
    """A tensor that was kept, by its place in a storage."""

    storage: _Storage
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class OffloadedSublayer:
    """What one sub-layer keeps of one micro-batch."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self._staying = {storage_of(tensor) for tensor in staying}
        self._kept: WeakValueDictionary[tuple[int, torch.dtype], _Storage] = WeakValueDictionary()
        self._leaving: list[Tensor] = []  # until they are copied
        self._copies: AbstractContextManager[object] | None = None
        self._is_away = False

    def forward_pass(self) -> AbstractContextManager[None]:
        """Around the sub-layer's forward pass: notes what it keeps."""
        return saved_tensors_hooks(self._packed, self._unpacked)

    def store(self) -> None:
        """Copy all of it to the host, beside what is computed next."""
        kept = list(self._kept.values())
        self._leaving, self._is_away = [one.flat for one in kept], True
        pinned = compute_device().type == "cuda"
        self._copy(kept, [torch.empty_like(one.flat, device="cpu", pin_memory=pinned) for one in kept])

    def release(self) -> None:
        """Free the device's memory, once the copies are made."""
        self._waited()
        self._leaving = []

    def load(self) -> None:
        """Copy to the device what is still needed, beside what is computed."""
        if self._is_away:
            self._is_away = False
            kept = list(self._kept.values())
            self._copy(kept, [torch.empty_like(one.flat, device=compute_device()) for one in kept])

    def _copy(self, kept: Sequence[_Storage], made: Sequence[Tensor]) -> None:
        """`made` has its memory from the computing stream, which thereby knows when it may be used again."""
        with (copies := beside_computing()):
            for storage, flat in zip(kept, made, strict=True):
                flat.copy_(storage.flat, non_blocking=True)
                storage.flat = flat
        self._copies = copies

    def _waited(self) -> None:
        if self._copies is not None:
            wait_for(self._copies)
            self._copies = None

    def _packed(self, tensor: Tensor) -> Tensor | _View:
        key = storage_of(tensor), tensor.dtype
        size = tensor.untyped_storage().nbytes()
        if key[0] in self._staying or size < SMALLEST or not tensor.dtype.is_floating_point:
            return tensor
        storage = self._kept.get(key)
        if storage is None:
            flat = tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0)
            storage = self._kept[key] = _Storage(self, flat)
        return _View(storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpacked(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.load()
        self._waited()
        return kept.storage.flat.as_strided(kept.size, kept.stride, kept.offset)


@dataclass
class OffloadedPass:
    """The sub-layers of one forward pass of a stage, of which each sends off what the one before it kept."""

    before: OffloadedSublayer | None = None

    def begin(self, layer: nn.Module, x_LBD: Tensor) -> OffloadedSublayer:
        """A sub-layer whose activations leave; a stream that is nobody's output stays."""
        whole = x_LBD if x_LBD._base is None else x_LBD._base
        return OffloadedSublayer([*layer.parameters(), *([whole] if whole.is_leaf else [])])

    def end(self, output_LBD: Tensor, kept: OffloadedSublayer | None) -> None:
        """A sub-layer has run, with what it kept, if that leaves."""
        if self.before is not None:
            self.before.release()
            before = self.before
            if output_LBD.requires_grad:
                output_LBD.register_hook(lambda _: before.load())
        self.before = kept
        if kept is not None:
            kept.store()

    def close(self) -> None:
        """The last sub-layer has run."""
        if self.before is not None:
            self.before.release()


def storage_of(tensor: Tensor) -> int:
    """A number that is its memory's as long as that lives."""
    return tensor.untyped_storage()._cdata
