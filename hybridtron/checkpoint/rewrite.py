"""Comparing two checkpoints, and rewriting one with full tensors and a chosen file size. Needs no process group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import NAMES, appearing, in_parts, write_bytes, write_tensors
from hybridtron.checkpoint.manifest import FILE, CheckpointManifest, File, Meta, StoredShard, to_bytes
from hybridtron.config.load import values_by_key
from hybridtron.data.workers import prefetched
from hybridtron.parallel.blocks import block

NOT_SET = "not set"  # shown for a setting that only the other checkpoint has
SHOWN = 48  # characters of a long value


@dataclass(frozen=True)
class CheckpointDifference:
    """A difference between two checkpoints: a tensor's or setting's name, and its values in both."""

    what: str
    left: str
    right: str


def differences(left: Checkpoint, right: Checkpoint) -> Iterator[CheckpointDifference]:
    """Yield the differences in metadata, settings and tensors between two checkpoints.

    If a tensor's values differ, its entry gives the norm of the difference relative to the left tensor's norm.
    """
    for name, ours, theirs in _settings(left, right):
        if ours != theirs:
            yield CheckpointDifference(name, *in_short(ours, theirs))
    ours = left.shapes
    theirs = right.shapes
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield CheckpointDifference(key, str(ours.get(key, "none")), str(theirs.get(key, "none")))
            continue
        a = left.whole(key)
        b = right.whole(key)
        if not torch.equal(a, b):
            apart = (a.double() - b.double()).norm().item()
            norm = a.double().norm().item()
            yield CheckpointDifference(key, f"norm {norm:.6g}", f"{apart / max(norm, 1e-300):.2e} of it apart")


def in_short(ours: Any, theirs: Any) -> tuple[str, str]:
    """Describe two different values briefly.

    Lists are described by where and by how much they differ, long texts by the part around the difference.
    """
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence) and not isinstance(ours, str):
        return f"{len(ours)} values", f"{len(theirs)} values, {_apart(ours, theirs)}"
    left = str(ours)
    right = str(theirs)
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return _around(left, same), _around(right, same)


def _apart(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Describe how two lists differ: the number of different entries, the largest difference, and the first one."""
    differing = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if not differing:
        return f"the first {min(len(ours), len(theirs))} the same"
    at = differing[0]
    first = f"first different at {at}: {_around(str(ours[at]), 0)} and {_around(str(theirs[at]), 0)}"
    pairs = [(ours[at], theirs[at]) for at in differing]
    if any(not isinstance(value, int | float) for pair in pairs for value in pair):
        return f"{len(differing)} different, {first}"
    largest = max(abs(a - b) for a, b in pairs)
    return f"{len(differing)} different by at most {largest:.3g}, {first}"


def _around(text: str, place: int) -> str:
    """Cut a long text to the part around a position."""
    if len(text) <= SHOWN:
        return text
    first = max(0, min(place - SHOWN // 4, len(text) - SHOWN))
    return f"{'...' if first else ''}{text[first : first + SHOWN]}{'...' if first + SHOWN < len(text) else ''}"


def _settings(left: Checkpoint, right: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, left value and right value for every metadata field and every setting, by its dotted key."""
    theirs: dict[str, Any] = dataclasses.asdict(right.meta)
    for name, value in dataclasses.asdict(left.meta).items():
        other = theirs[name]
        if isinstance(value, dict) and isinstance(other, dict):
            for key in {**value, **other}:
                yield f"{name}.{key}", value.get(key), other.get(key)
        else:
            yield name, value, other
    left_settings = values_by_key(left.config)
    right_settings = values_by_key(right.config)
    for key in {**left_settings, **right_settings}:
        yield f"config.yaml {key}", left_settings.get(key, NOT_SET), right_settings.get(key, NOT_SET)


def rewrite(source: Checkpoint, target: Path, file_size: int, progress: Callable[[int, int], None]) -> int:
    """Rewrite the checkpoint with full tensors, about `file_size` bytes to a file; return how many files were written.

    One file's tensors are written while the next file's are read. The folder appears complete or not at all. `progress`
    is called with the number of finished files and their total number.
    """
    planned = list(_planned(source, file_size))

    def tensors() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for number, (name, keys) in enumerate(planned):
            progress(number, len(planned))
            yield name, {key: source.whole(key) for key in keys}

    small = {name: source.verified(name) for name in ("config.yaml", "tokenizer.json")}
    with appearing(target) as temporary:
        write_whole(temporary, source.meta, small, tensors())
    return len(planned)


def write_whole(
    folder: Path, meta: Meta, small: Mapping[str, bytes], tensors: Iterable[tuple[str, Mapping[str, Tensor]]]
) -> None:
    """Write a checkpoint with full tensors from a single process into an existing folder.

    `small` has the contents of small files by name; `tensors` yields each tensor file's name and its tensors by key.
    """
    files: dict[str, File] = {name: write_bytes(folder / name, stored) for name, stored in small.items()}
    chunks: list[StoredShard] = []
    for name, of_file in prefetched(iter(tensors)):
        blocks = [block(key, t.shape, (0,) * t.dim(), t, main=True) for key, t in of_file.items()]
        files[name], new_chunks = write_tensors(folder / name, blocks)
        chunks += new_chunks
    write_bytes(folder / FILE, to_bytes(CheckpointManifest(meta, files, tuple(chunks))))


def _planned(source: Checkpoint, file_size: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each file to write and the keys of its tensors, in the source's order."""
    kinds: dict[str, dict[str, int]] = {}
    for chunk in source.manifest.chunks:
        size = math.prod(chunk.shape) * NAMES[chunk.dtype].itemsize
        kinds.setdefault(chunk.file.partition("-")[0], {})[chunk.key] = size
    for kind, sizes in kinds.items():
        for number, keys in enumerate(in_parts(sizes, sizes.__getitem__, file_size)):
            yield f"{kind}-{number:05}.safetensors", keys
