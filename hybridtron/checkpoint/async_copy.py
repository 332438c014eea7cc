"""Copies of a checkpoint's tensors on the CPU, from which the checkpoint is written while training continues.

The next forward pass changes the recurrent states that are carried between steps, and the random states. Both are
copied before training continues. Weights and Adam's moments change only in the next update. Threads copy them during
the next forward and backward pass. Each copy is checked for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from hybridtron.checkpoint.files import copy
from hybridtron.checkpoint.finite import KINDS, NotFinite, is_finite
from hybridtron.device import beside_computing, host_memory_for

COPIERS = 2  # threads; they run in parallel, because copying and checking release Python's lock


class Copied(NamedTuple):
    """A copied block: a `ShardedTensor` whose `data` is a copy of this process's shard.

    `finite` is False if the copy contains NaN or infinity.
    """

    block: Any
    finite: bool


@dataclass(frozen=True)
class Copies:
    """The copies for one checkpoint's blocks, by kind of file (`model`, `optimizer`, `states`, ...).

    Threads may still be making some copies.
    """

    files: Mapping[str, Sequence[Future[Copied]]]

    @property
    def trained(self) -> list[Future[Copied]]:
        """The copies of weights and moments, for which the next update must wait."""
        return [future for kind in KINDS for future in self.files.get(kind, ())]

    def fault(self) -> str | None:
        """Wait until weights and moments are copied; return a key whose tensor has NaN or infinity, or None.

        Copies that failed with an exception are ignored here: `blocks` raises the exception.
        """
        wait(self.trained)
        copied = (entry.result() for entry in self.trained if entry.exception() is None)
        return next((entry.block.key for entry in copied if not entry.finite), None)

    def blocks(self) -> dict[str, list[Any]]:
        """Wait for all copies and return them by kind of file.

        Raises NotFinite if a weight or moment is not finite, or the exception with which a copy failed.
        """
        if key := self.fault():
            raise NotFinite(f"{key} contains NaN or infinity")
        return {name: [future.result().block for future in of_file] for name, of_file in self.files.items()}


class Copier:
    """Threads that copy the blocks for a run's checkpoints. Each checkpoint reuses the last checkpoint's memory.

    On CUDA this memory is pinned.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPIERS, "copier")
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # (key, offset) of a block -> its copy

    def start(self, blocks: Mapping[str, Sequence[Any]]) -> Copies:
        """Start to copy all blocks, and return when all blocks other than weights and moments are copied."""
        kinds = sorted(blocks, key=KINDS.__contains__)  # weights and moments last: training need not wait for them
        files = {
            name: [self._threads.submit(self._copy, item, beside_computing()) for item in blocks[name]]
            for name in kinds
        }
        wait([item for name, of_file in files.items() if name not in KINDS for item in of_file])
        return Copies(files)

    def _copy(self, block: Any, side_stream: AbstractContextManager[Any]) -> Copied:
        """Copy a block to the CPU, on a CUDA stream that overlaps with computation, and look for NaN and infinity."""
        key = (block.key, block.global_offset)
        memory = self._memory.get(key)
        if memory is None or memory.shape != block.data.shape or memory.dtype != block.data.dtype:
            memory = self._memory[key] = host_memory_for(block.data)
        with side_stream:
            copy(block.data, memory)
        return Copied(replace(block, data=memory), is_finite(memory))
