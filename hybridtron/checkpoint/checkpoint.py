"""Reading a checkpoint: full tensors, or the shards that a rank needs, with every digest verified.

A checkpoint is a folder with these files:

    config.yaml, tokenizer.json, manifest.json
    model-00000.safetensors, ...     weights in the forward pass's dtype
    optimizer-00000..., ...          Adam's moments, fp32 masters of weights that are bf16 in the forward pass, and with
                                     `run.ema` the moving average of the weights
    fp8-00000..., ...                recent maximum absolute values (amax), which delayed FP8 scaling needs
    states-00000..., ...             recurrent states carried between steps, and statistics for random initial states
    random-00000..., ...             the random number generators' states

The first part of a name (model, optimizer, ...) is the kind of file. In training, the processes of a node write at most
one file per kind, numbered by the node (`node_files.py`). In version 0.2.0 each process wrote its own files, numbered
by its rank. They are read in the same way. Nothing is pickled. If the model fuses projections into one weight, each
projection is stored as its own tensor (`in_proj.weight.x`, `in_proj.weight.z`).

A chunk is a rectangle of a full tensor. Each chunk was written by one process. A process that needs a rectangle copies
from every chunk that overlaps the rectangle. So a run can use another parallel layout than the run that wrote the
checkpoint.
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
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.blocks import full_rectangle, weight_blocks

MASTER = "master."  # prefix of fp32 masters' keys, in front of the weight's key
READERS = 4  # threads; they run in parallel, because reading and digesting release Python's lock


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a valid manifest.

    `open` also verifies config.yaml. All other files and chunks are verified when they are read.
    """

    folder: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a checkpoint, and verify its manifest and config.yaml.

        Raises BrokenCheckpoint if either file is damaged, or if the manifest does not list all shards of a tensor.
        """
        checkpoint = cls(folder, manifest.read(folder))
        if missing := checkpoint.manifest.incomplete():
            raise BrokenCheckpoint(f"{folder}: its manifest does not list all shards of {missing[0]}", code="missing")
        checkpoint.verified("config.yaml")
        return checkpoint

    @classmethod
    def of_manifest(cls, folder: Path, stored: bytes) -> Self:
        """Return a checkpoint that another process has opened; `stored` has the bytes of its manifest."""
        return cls(folder, manifest.read(folder, stored))

    @property
    def meta(self) -> Meta:
        return self.manifest.meta

    @cached_property
    def config(self) -> Config:
        return load_saved(self.folder / "config.yaml")

    @cached_property
    def plan(self) -> RunPlan:
        """The stored configuration with its resolved phases."""
        return RunPlan.of(self.config)

    def verified(self, name: str) -> bytes:
        """Read and verify a file without tensors, or the header of a safetensors file, and return these bytes.

        Raises BrokenCheckpoint if the file is missing or damaged.
        """
        if name not in self.manifest.files:
            raise BrokenCheckpoint(f"{self.folder}: its manifest lists no file {name}", code="no-file")
        return read_head(self.folder, name, self.manifest.files[name])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all full tensors, by key."""
        return {key: chunks[0].shape for key, chunks in self._chunks.items()}

    def dtype(self, key: str) -> torch.dtype:
        return NAMES[self._of(key)[0].dtype]

    def widest(self, key: str) -> str:
        """Return the key of a weight's fp32 master if the checkpoint has a master, else the weight's key.

        `key` is the key of the weight or of its master.
        """
        weight = key.removeprefix(MASTER)
        master = f"{MASTER}{weight}"
        if master in self._chunks:
            return master
        return weight

    def whole(self, key: str) -> Tensor:
        """Read and verify a full tensor, and return it on the CPU.

        Raises BrokenCheckpoint if the tensor is missing or damaged.
        """
        first, *others = self._of(key)
        if not others:  # the only chunk is the full tensor
            return read_chunk(self.folder, first, self.manifest.files[first.file])
        into = torch.empty(first.shape, dtype=NAMES[first.dtype])
        # not self._fill: a subclass may compute tensors there, from stored tensors that it reads with this method
        Checkpoint._fill(self, key, [(into, (0,) * into.dim())])
        return into

    def unrounded(self, key: str) -> Tensor:
        """Read and verify a full weight, from its fp32 master if the checkpoint has a master.

        Raises BrokenCheckpoint if the tensor is missing or damaged.
        """
        return self.whole(self.widest(key))

    def fill(self, blocks: Sequence[Any]) -> None:
        """Read stored values into the tensors of blocks.

        A block is a `ShardedTensor`: a rank's rectangle in a full tensor.

        Raises BrokenCheckpoint if a tensor is missing or damaged, or if its stored shape differs from the block's
        `global_shape`.
        """
        targets: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}
        for block in blocks:
            if self._of(block.key)[0].shape != tuple(block.global_shape):
                shapes = f"{self._of(block.key)[0].shape}; the model needs {tuple(block.global_shape)}"
                raise BrokenCheckpoint(f"{self.folder}: {block.key} has the shape {shapes}", code="mismatch")
            targets.setdefault(block.key, []).append((block.data, block.global_offset))
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(lambda key: self._fill(key, targets[key]), targets))

    def weights(self, table: Mapping[str, Parameter], unrounded: bool = False) -> Callable[[str], Tensor]:
        """Return a function that reads a weight by its name in the model.

        A fused weight is concatenated from its projections. With `unrounded`, they are read by the method `unrounded`.
        """
        read = self.whole
        if unrounded:
            read = self.unrounded

        def weight(name: str) -> Tensor:
            parameter = table[name]
            return torch.cat([read(key) for key in parameter.stored(name)], parameter.parts_axis)

        return weight

    def load_weights(self, model: LanguageModel) -> None:
        """Read all weights of an unsharded model, in place."""
        blocks = []
        for name, weight in model.named_parameters():
            parameter = model.table[name]
            mesh = model.slice.meshes[parameter.family]
            blocks += weight_blocks(name, [full_rectangle(weight.data)], parameter, mesh)
        self.fill(blocks)

    def faults(self) -> Iterator[str]:
        """Read all files; yield a message for each damaged file or chunk, and for each chunk with NaN or infinity.

        Only the files `model-...` and `optimizer-...` are searched for NaN and infinity: weights, moments and masters.
        """
        for name in self.manifest.files:
            try:
                self.verified(name)
            except BrokenCheckpoint as error:
                yield str(error)
        with ThreadPoolExecutor(READERS) as threads:
            yield from filter(None, threads.map(self._fault, self.manifest.chunks))

    def verify_chunks(self, kind: str, rank: int, ranks: int) -> None:
        """Verify every `ranks`-th chunk of a kind such as `states`, starting at chunk number `rank`.

        So `ranks` processes share the work: together they verify every chunk once. A process also verifies chunks that
        another process has written. Raises BrokenCheckpoint if a chunk is damaged, or if a weight, moment or master
        contains NaN or infinity.
        """
        for chunk in [entry for entry in self.manifest.chunks if entry.file.startswith(f"{kind}-")][rank::ranks]:
            self._verify(chunk)

    def verify_weights(self, rank: int, ranks: int) -> None:
        """Verify every `ranks`-th chunk of the weights and their fp32 masters, as `verify_chunks` does for a kind."""
        weights = (entry for entry in self.manifest.chunks if entry.file.startswith("model-"))
        masters = (entry for entry in self.manifest.chunks if entry.key.startswith(MASTER))
        for chunk in [*weights, *masters][rank::ranks]:
            self._verify(chunk)

    def _verify(self, chunk: StoredShard) -> None:
        """Raise BrokenCheckpoint if a chunk is damaged, or if a weight, moment or master contains NaN or infinity."""
        stored = read_chunk(self.folder, chunk, self.manifest.files[chunk.file])
        if chunk.file.startswith(KINDS) and not is_finite(stored):
            raise BrokenCheckpoint(
                f"{self.folder / chunk.file}: {chunk.key} contains NaN or infinity", code="out-of-range"
            )

    def _fault(self, chunk: StoredShard) -> str | None:
        """Verify a chunk; return a message if it is faulty, else None."""
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
            raise BrokenCheckpoint(f"{self.folder} has no tensor {key}, which the model needs", code="mismatch")
        return self._chunks[key]

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Fill tensors with rectangles of the stored tensor `key`.

        `wanted` lists the rectangles, each as (tensor to fill, the rectangle's offset in the full tensor). A chunk that
        overlaps any rectangle is read once. Other chunks are not read.
        """
        missing = sum(target.numel() for target, _ in wanted)
        for chunk in self._of(key):
            overlapping = [
                (target, offset, overlap)
                for target, offset in wanted
                if (overlap := _overlap(chunk, target, offset)) is not None
            ]
            if not overlapping:
                continue
            stored = read_chunk(self.folder, chunk, self.manifest.files[chunk.file])
            for target, offset, overlap in overlapping:
                in_chunk = tuple(
                    slice(r.start - first, r.stop - first) for r, first in zip(overlap, chunk.offset, strict=True)
                )
                in_target = tuple(
                    slice(r.start - first, r.stop - first) for r, first in zip(overlap, offset, strict=True)
                )
                copy(stored[in_chunk], target[in_target])
                missing -= math.prod(map(len, overlap))
        assert missing == 0, f"the chunks of {key} overlap each other or leave gaps"


def fill_rectangles(whole: Tensor, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
    """Copy rectangles of a full tensor. `wanted` lists (tensor to fill, its rectangle's offset in the full tensor)."""
    for target, offset in wanted:
        copy(whole[tuple(slice(first, first + n) for first, n in zip(offset, target.shape, strict=True))], target)


def _overlap(chunk: StoredShard, target: Tensor, offset: Sequence[int]) -> tuple[range, ...] | None:
    """Intersect a chunk with the rectangle that begins at `offset` and has the shape of `target`.

    Returns an index range per axis of the full tensor, or None if chunk and rectangle do not overlap.
    """
    overlap = tuple(
        range(max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(chunk.offset, chunk.size, offset, target.shape, strict=True)
    )
    return overlap if all(overlap) else None
