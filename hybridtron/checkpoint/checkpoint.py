"""Reading a checkpoint: full tensors, or any layout's blocks, verified as they are read.

    config.yaml, tokenizer.json, manifest.json
    model-00000.safetensors, ...     weights in the forward pass's dtype, each file written by one process
    optimizer-00000..., ...          Adam's moments, and fp32 masters for weights computed in bf16
    fp8-00000..., ...                the largest absolute values that delayed FP8 scaling remembers
    states-00000..., ...             carried states by lane, and the statistics that noise is fitted to
    random-00000..., ...             each process's random states

Fused projections are stored by their parts (`in_proj.weight.x`, `in_proj.weight.z`). Nothing is pickled. A reader takes
each rectangle from the chunks that overlap it, so any layout can read a checkpoint that any other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.files import NAMES, copy, read_chunk, read_head
from hybridtron.checkpoint.finite import KINDS, is_finite
from hybridtron.checkpoint.manifest import BrokenCheckpoint, CheckpointManifest, Meta, StoredShard
from hybridtron.config.load import load_saved
from hybridtron.config.schema import Config
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.blocks import full_rectangle, weight_blocks

READERS = 4  # threads; they run in parallel, because reading and digesting release Python's lock


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a valid manifest. All other bytes are verified when they are read."""

    folder: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a checkpoint. Raises BrokenCheckpoint if the manifest or the configuration is damaged."""
        checkpoint = cls(folder, manifest.read(folder))
        if missing := checkpoint.manifest.incomplete():
            raise BrokenCheckpoint(f"{folder} holds only a part of {missing[0]}")
        checkpoint.verified("config.yaml")
        return checkpoint

    @property
    def meta(self) -> Meta:
        return self.manifest.meta

    @cached_property
    def config(self) -> Config:
        return load_saved(self.folder / "config.yaml")

    def verified(self, name: str) -> bytes:
        """Read and verify a small file."""
        if name not in self.manifest.files:
            raise BrokenCheckpoint(f"{self.folder} has no {name}")
        return read_head(self.folder, name, self.manifest.files[name])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all full tensors, by key."""
        return {key: chunks[0].shape for key, chunks in self._chunks.items()}

    def dtype(self, key: str) -> torch.dtype:
        return NAMES[self._of(key)[0].dtype]

    def whole(self, key: str) -> Tensor:
        """Read and verify a full tensor, on the CPU."""
        first, *others = self._of(key)
        if not others:  # it was written as one chunk
            return read_chunk(self.folder, first, self.manifest.files[first.file])
        into = torch.empty(first.shape, dtype=NAMES[first.dtype])
        self._fill(key, [(into, (0,) * into.dim())])
        return into

    def fill(self, blocks: Sequence[Any]) -> None:
        """Read blocks (`ShardedTensor`s) of any layout, in place. Raises BrokenCheckpoint if shapes differ."""
        targets: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}
        for block in blocks:
            if self._of(block.key)[0].shape != tuple(block.global_shape):
                shapes = f"{self._of(block.key)[0].shape}, not {tuple(block.global_shape)}"
                raise BrokenCheckpoint(f"{self.folder} holds {block.key} of shape {shapes}")
            targets.setdefault(block.key, []).append((block.data, block.global_offset))
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(lambda key: self._fill(key, targets[key]), targets))

    def weights(self, table: Mapping[str, Parameter]) -> Callable[[str], Tensor]:
        """Return a function that reads a full weight by its name in the model, and joins its stored parts."""

        def weight(name: str) -> Tensor:
            parameter = table[name]
            return torch.cat([self.whole(key) for key in parameter.stored(name)], parameter.parts_axis)

        return weight

    def load_weights(self, model: LanguageModel) -> None:
        """Fill all weights of a model that is not sharded, in place."""
        blocks = []
        for name, weight in model.named_parameters():
            parameter = model.table[name]
            mesh = model.slice.meshes[parameter.family]
            blocks += weight_blocks(name, [full_rectangle(weight.data)], parameter, mesh)
        self.fill(blocks)

    def faults(self) -> Iterator[str]:
        """Read every byte, and yield a message for each damaged or non-finite part."""
        for name in self.manifest.files:
            try:
                self.verified(name)
            except BrokenCheckpoint as error:
                yield str(error)
        with ThreadPoolExecutor(READERS) as threads:
            yield from filter(None, threads.map(self._fault, self.manifest.chunks))

    def verify_chunks(self, kind: str, share: int, shares: int) -> None:
        """Verify this process's share of the chunks in the files of a kind, such as `states`.

        The share is every `shares`-th chunk from number `share` on. Raises BrokenCheckpoint.
        """
        for chunk in [entry for entry in self.manifest.chunks if entry.file.startswith(f"{kind}-")][share::shares]:
            self._verify(chunk)

    def _verify(self, chunk: StoredShard) -> None:
        """Verify a chunk's digest, and that weights and moments are finite. Raises BrokenCheckpoint."""
        stored = read_chunk(self.folder, chunk, self.manifest.files[chunk.file])
        if chunk.file.startswith(KINDS) and not is_finite(stored):
            raise BrokenCheckpoint(f"{self.folder / chunk.file} holds values of {chunk.key} that are not finite")

    def _fault(self, chunk: StoredShard) -> str | None:
        try:
            self._verify(chunk)
        except BrokenCheckpoint as error:
            return f"{error} ({chunk.key})"
        return None

    @cached_property
    def _chunks(self) -> Mapping[str, list[StoredShard]]:
        by_key: dict[str, list[StoredShard]] = {}
        for chunk in self.manifest.chunks:
            by_key.setdefault(chunk.key, []).append(chunk)
        return by_key

    def _of(self, key: str) -> list[StoredShard]:
        """Return a tensor's chunks. Raises BrokenCheckpoint if there are none."""
        if key not in self._chunks:
            raise BrokenCheckpoint(f"{self.folder} holds no {key}")
        return self._chunks[key]

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Fill the wanted rectangles of one tensor; read each overlapping chunk once."""
        missing = sum(into.numel() for into, _ in wanted)
        for chunk in self._of(key):
            shared = [
                (into, offset, run) for into, offset in wanted if (run := _shared(chunk, into, offset)) is not None
            ]
            if not shared:
                continue
            stored = read_chunk(self.folder, chunk, self.manifest.files[chunk.file])
            for into, offset, runs in shared:
                theirs = tuple(
                    slice(r.start - first, r.stop - first) for r, first in zip(runs, chunk.offset, strict=True)
                )
                ours = tuple(slice(r.start - first, r.stop - first) for r, first in zip(runs, offset, strict=True))
                copy(stored[theirs], into[ours])
                missing -= math.prod(map(len, runs))
        assert missing == 0, f"{key} has chunks that overlap or leave gaps"


def fill_rectangles(whole: Tensor, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
    """Copy rectangles from a full tensor; each is given as a tensor to fill and its offset in the full tensor."""
    for into, offset in wanted:
        copy(whole[tuple(slice(first, first + n) for first, n in zip(offset, into.shape, strict=True))], into)


def _shared(chunk: StoredShard, into: Tensor, offset: Sequence[int]) -> tuple[range, ...] | None:
    """Intersect a chunk with a rectangle: one range per axis of the full tensor, or None if they do not overlap."""
    runs = tuple(
        range(max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(chunk.offset, chunk.size, offset, into.shape, strict=True)
    )
    return runs if all(runs) else None
