"""Copies of a checkpoint's tensors, so that it can be written while training continues.

Carried states and random states change in the next forward pass, so they are copied at once. Weights and moments change
in the next update. Threads copy them until then, and check that each copy is finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtron.checkpoint.files import copy
from hybridtron.checkpoint.finite import KINDS, NotFinite, is_finite
from hybridtron.device import beside_computing

COPIERS = 2  # threads; they run in parallel, because copying and checking release Python's lock


class Copied(NamedTuple):
    """A copied block; `finite` is True if all its entries are finite."""

    block: Any
    finite: bool


@dataclass(frozen=True)
class Copies:
    """The copies of one checkpoint's blocks, by file kind. Some may still be under way."""

    files: Mapping[str, Sequence[Future[Copied]]]

    @property
    def trained(self) -> list[Future[Copied]]:
        """The copies of weights and moments. The next update must wait for them."""
        return [future for kind in KINDS for future in self.files.get(kind, ())]

    def fault(self) -> str | None:
        """Wait until weights and moments are copied; return the key of one that is not finite, or None.

        A copy that failed with an exception is skipped here; `blocks` raises it.
        """
        wait(self.trained)
        copied = (entry.result() for entry in self.trained if entry.exception() is None)
        return next((entry.block.key for entry in copied if not entry.finite), None)

    def blocks(self) -> dict[str, list[Any]]:
        """Wait for all copies and return them by file kind. Raises NotFinite, or a copy's own exception."""
        if key := self.fault():
            raise NotFinite(f"values of {key} are not finite")
        return {name: [future.result().block for future in of_file] for name, of_file in self.files.items()}


class Copier:
    """Threads that copy the blocks of a run's checkpoints, into the same memory each time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPIERS, "copier")
        self._held: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def start(self, blocks: Mapping[str, Sequence[Any]]) -> Copies:
        """Start to copy all blocks. When this returns, only weights and moments may still be under way."""
        first_now = sorted(blocks, key=KINDS.__contains__)
        files = {
            name: [self._threads.submit(self._copied, item, beside_computing()) for item in blocks[name]]
            for name in first_now
        }
        wait([item for name, of_file in files.items() if name not in KINDS for item in of_file])
        return Copies(files)

    def _copied(self, one: Any, beside: AbstractContextManager[Any]) -> Copied:
        """Copy a block into reused memory, and check that the copy is finite."""
        place = (one.key, one.global_offset)
        memory = self._held.get(place)
        if memory is None or memory.shape != one.data.shape or memory.dtype != one.data.dtype:
            memory = self._held[place] = torch.empty(one.data.shape, dtype=one.data.dtype, device="cpu")
        with beside:
            copy(one.data, memory)
        return Copied(replace(one, data=memory), is_finite(memory))
