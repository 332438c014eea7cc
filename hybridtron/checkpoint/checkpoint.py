"""A checkpoint that was written: reading it, whole tensors or any layout's blocks, verified as it is read.

    config.yaml, tokenizer.json, manifest.json
    model-00000.safetensors, ...     the weights as they are computed with, each file written by one process
    optimizer-00000..., ...          Adam's moments, and the fp32 masters of weights computed in bf16
    fp8-00000..., ...                the greatest values that scale FP8's products, of fp8_delayed
    states-00000..., ...             carried states of all lanes, and what noise is fitted to
    random-00000..., ...             the state of each process's random generators

Fused projections are stored by their parts (`in_proj.weight.x`, `in_proj.weight.z`). Nothing is pickled. A reader
takes what it needs from the chunks that hold it, whatever layout wrote them.
"""

from __future__ import annotations

import itertools
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

READERS = 4  # threads: reading and digesting leave Python's lock


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is sound; everything else is verified when it is read."""

    folder: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises BrokenCheckpoint where the manifest, or the configuration, is not what was written."""
        found = cls(folder, manifest.read(folder))
        if missing := found.manifest.incomplete():
            raise BrokenCheckpoint(f"{folder} holds only a part of {missing[0]}")
        found.verified("config.yaml")
        return found

    @property
    def meta(self) -> Meta:
        return self.manifest.meta

    @cached_property
    def config(self) -> Config:
        return load_saved(self.folder / "config.yaml")

    def verified(self, name: str) -> bytes:
        """The bytes of a small file."""
        if name not in self.manifest.files:
            raise BrokenCheckpoint(f"{self.folder} has no {name}")
        return read_head(self.folder, name, self.manifest.files[name])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every whole tensor, by its key."""
        return {key: chunks[0].shape for key, chunks in self._chunks.items()}

    def dtype(self, key: str) -> torch.dtype:
        return NAMES[self._of(key)[0].dtype]

    def whole(self, key: str) -> Tensor:
        """A whole tensor, on the CPU."""
        first, *others = self._of(key)
        if not others:  # it was written whole
            return read_chunk(self.folder, first, self.manifest.files[first.file])
        into = torch.empty(first.shape, dtype=NAMES[first.dtype])
        self._fill(key, [(into, (0,) * into.dim())])
        return into

    def fill(self, blocks: Sequence[Any]) -> None:
        """Read what blocks (`ShardedTensor`s) stand for into their data."""
        wanted: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}
        for block in blocks:
            if self._of(block.key)[0].shape != tuple(block.global_shape):
                shapes = f"{self._of(block.key)[0].shape}, not {tuple(block.global_shape)}"
                raise BrokenCheckpoint(f"{self.folder} holds {block.key} of shape {shapes}")
            wanted.setdefault(block.key, []).append((block.data, block.global_offset))
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(lambda key: self._fill(key, wanted[key]), wanted))

    def weights(self, table: Mapping[str, Parameter]) -> Callable[[str], Tensor]:
        """What reads a whole weight by its name in the model."""

        def weight(name: str) -> Tensor:
            return torch.cat([self.whole(key) for key in table[name].stored(name)])

        return weight

    def load_weights(self, model: LanguageModel) -> None:
        """Fill a whole model's weights."""
        blocks = (
            weight_blocks(name, [full_rectangle(weight.data)], model.table[name], model.slice.mesh)
            for name, weight in model.named_parameters()
        )
        self.fill(list(itertools.chain.from_iterable(blocks)))

    def faults(self) -> Iterator[str]:
        """Everything that is not as it was written, or should not have been, after reading every byte."""
        for name in self.manifest.files:
            try:
                self.verified(name)
            except BrokenCheckpoint as error:
                yield str(error)
        with ThreadPoolExecutor(READERS) as threads:
            yield from filter(None, threads.map(self._fault, self.manifest.chunks))

    def verify_chunks(self, kind: str, share: int, shares: int) -> None:
        """Read one share of the chunks in files of a kind. Raises BrokenCheckpoint."""
        for chunk in [one for one in self.manifest.chunks if one.file.startswith(f"{kind}-")][share::shares]:
            self._verify(chunk)

    def _verify(self, chunk: StoredShard) -> None:
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
        if key not in self._chunks:
            raise BrokenCheckpoint(f"{self.folder} holds no {key}")
        return self._chunks[key]

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Read the chunks that the wanted rectangles of a tensor touch, each once."""
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
    """Copy rectangles of a whole tensor, each given as what to fill and where it begins."""
    for into, offset in wanted:
        copy(whole[tuple(slice(first, first + n) for first, n in zip(offset, into.shape, strict=True))], into)


def _shared(chunk: StoredShard, into: Tensor, offset: Sequence[int]) -> tuple[range, ...] | None:
    """What a chunk and a rectangle have in common, in the whole tensor's places."""
    runs = tuple(
        range(max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(chunk.offset, chunk.size, offset, into.shape, strict=True)
    )
    return runs if all(runs) else None
