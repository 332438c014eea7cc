"""Offload activations to host memory between forward and backward, for runs with `parallel.offload`.

Let A be a sub-layer, and let B be the next one. After A's forward pass, A's saved activations are copied to pinned
memory while B computes. At the end of B's forward pass, the CUDA stream that computes waits for the copies, and A's
memory on the device is freed. In the backward pass, A's activations are copied back while B runs backward: a hook on
the gradient of B's output starts the copies, and the first access to a saved tensor of A waits for the copies. So the
device holds the activations of two sub-layers at most: the sub-layer that computes, and one neighbour.

A tensor's storage is copied once, in full, no matter how many views of the storage are saved. Its bits do not change.
Small tensors, integers and weights stay on the device. A residual stream received from another pipeline stage also
stays on the device, because the pipeline schedule keeps this tensor in memory anyway.
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

from hybridtron.device import beside_computing, compute_device, host_memory_for, wait_for

SMALLEST = 2**20  # bytes; smaller tensors stay on the device


class _Storage:
    """A saved storage, on the device or on the host. It is freed when autograd no longer needs any view of it."""

    def __init__(self, owner: OffloadedSublayer, flat: Tensor) -> None:
        self.owner = owner
        self.flat = flat  # all elements of the storage, in one dimension


class _View(NamedTuple):
    """A saved tensor, as a view of a storage."""

    storage: _Storage
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class OffloadedSublayer:
    """Activations that one sub-layer saves for one micro-batch. The tensors in `staying` stay on the device."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self._staying = {storage_of(tensor) for tensor in staying}
        self._kept: WeakValueDictionary[tuple[int, torch.dtype], _Storage] = WeakValueDictionary()
        self._leaving: list[Tensor] = []  # device tensors, kept alive until they are copied to the host
        self._copies: AbstractContextManager[object] | None = None
        self._is_away = False  # True while the storages are on the host

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return a context for the sub-layer's forward pass. It records the tensors saved for the backward pass."""
        return saved_tensors_hooks(self._packed, self._unpacked)

    def store(self) -> None:
        """Copy all saved storages to the host, asynchronously."""
        storages = list(self._kept.values())
        self._leaving = [storage.flat for storage in storages]
        self._is_away = True
        self._copy(storages, [host_memory_for(storage.flat) for storage in storages])

    def release(self) -> None:
        """Wait for the copies to the host and free the device's memory."""
        self._waited()
        self._leaving = []

    def load(self) -> None:
        """Copy the storages that are still needed back to the device, asynchronously."""
        if self._is_away:
            self._is_away = False
            storages = list(self._kept.values())
            self._copy(storages, [torch.empty_like(storage.flat, device=compute_device()) for storage in storages])

    def _copy(self, kept: Sequence[_Storage], made: Sequence[Tensor]) -> None:
        """Copy the storages `kept` into the tensors `made`, on a second CUDA stream; make the storages refer to `made`.

        The caller allocated `made` on the stream that computes, so that the caching allocator knows when the memory of
        `made` may be reused.
        """
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
    """A stage's forward pass, which offloads the activations of sub-layers.

    When a sub-layer ends, the device memory of the previous sub-layer's activations is freed. `before` holds the
    activations of the previous sub-layer, or is None if they stay on the device.
    """

    before: OffloadedSublayer | None = None

    def begin(self, layer: nn.Module, x_LBD: Tensor) -> OffloadedSublayer:
        """Return the object that records and offloads a sub-layer's activations.

        Weights stay on the device. The residual stream `x_LBD` also stays on the device if it is a leaf of autograd: a
        leaf was received from another pipeline stage.
        """
        whole = x_LBD if x_LBD._base is None else x_LBD._base
        return OffloadedSublayer([*layer.parameters(), *([whole] if whole.is_leaf else [])])

    def end(self, output_LBD: Tensor, kept: OffloadedSublayer | None) -> None:
        """Release the previous sub-layer's activations on the device, and copy those of this sub-layer to the host.

        `kept` holds this sub-layer's activations, or is None if they stay on the device.
        """
        if self.before is not None:
            self.before.release()
            before = self.before
            if output_LBD.requires_grad:
                output_LBD.register_hook(lambda _: before.load())
        self.before = kept
        if kept is not None:
            kept.store()

    def close(self) -> None:
        """Release the last sub-layer's activations on the device, after the forward pass."""
        if self.before is not None:
            self.before.release()


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage for as long as the storage lives."""
    return tensor.untyped_storage()._cdata
