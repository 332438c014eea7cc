"""Copies of what a checkpoint is made of, from which it is written while training continues.

Carried states and random states change with the next forward pass and are copied at once. Weights and moments change
with the next update: until then threads copy them, and look at each copy, whether all its entries are finite.
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

COPIERS = 2  # threads; copying and looking leave Python's lock


class Copied(NamedTuple):
    """A copy of a block, and whether all its entries are finite."""

    block: Any
    finite: bool


@dataclass(frozen=True)
class Copies:
    """Of the blocks of one checkpoint, by their files; made, or under way."""

    files: Mapping[str, Sequence[Future[Copied]]]

    @property
    def trained(self) -> list[Future[Copied]]:
        """Of weights and moments, which no update may overtake."""
        return [one for kind in KINDS for one in self.files.get(kind, ())]

    def fault(self) -> str | None:
        """The key of a weight or moment that is not finite, when all are copied. One that could not be is no fault."""
        wait(self.trained)
        copied = (one.result() for one in self.trained if one.exception() is None)
        return next((one.block.key for one in copied if not one.finite), None)

    def blocks(self) -> dict[str, list[Any]]:
        """The copies, when all are made. Raises NotFinite."""
        if key := self.fault():
            raise NotFinite(f"values of {key} are not finite")
        return {name: [one.result().block for one in of_file] for name, of_file in self.files.items()}


class Copier:
    """Copies the blocks of a run's checkpoints, into the same memory each time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPIERS, "copier")
        self._held: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def start(self, blocks: Mapping[str, Sequence[Any]]) -> Copies:
        """Begin to copy what waits for the next update; all else is copied when this returns."""
        first_now = sorted(blocks, key=KINDS.__contains__)
        files = {
            name: [self._threads.submit(self._copied, one, beside_computing()) for one in blocks[name]]
            for name in first_now
        }
        wait([one for name, of_file in files.items() if name not in KINDS for one in of_file])
        return Copies(files)

    def _copied(self, one: Any, beside: AbstractContextManager[Any]) -> Copied:
        place = (one.key, one.global_offset)
        held = self._held.get(place)
        if held is None or held.shape != one.data.shape or held.dtype != one.data.dtype:
            held = self._held[place] = torch.empty(one.data.shape, dtype=one.data.dtype, device="cpu")
        with beside:
            copy(one.data, held)
        return Copied(replace(one, data=held), is_finite(held))
