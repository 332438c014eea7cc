"""Compares two checkpoints, and rewrites a checkpoint with full tensors in files of a chosen size.

Both tasks need only one process.
"""

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

NOT_SET = "not set"  # shown for a checkpoint without a setting that the other checkpoint has
MAX_CHARACTERS = 48  # longer values are shortened


@dataclass(frozen=True)
class CheckpointDifference:
    """A difference between two checkpoints.

    what: name of a tensor, a setting or a metadata field
    left, right: descriptions of its values in both checkpoints
    """

    what: str
    left: str
    right: str


def differences(left: Checkpoint, right: Checkpoint) -> Iterator[CheckpointDifference]:
    """Yield the differences in metadata, settings and tensors between two checkpoints.

    If only a tensor's values differ, the left description has the left tensor's norm. The right description has the
    norm of the tensors' difference, divided by the left tensor's norm.
    """
    for name, left_value, right_value in _settings(left, right):
        if left_value != right_value:
            yield CheckpointDifference(name, *in_short(left_value, right_value))
    left_shapes = left.shapes
    right_shapes = right.shapes
    for key in sorted(left_shapes.keys() | right_shapes.keys()):
        if left_shapes.get(key) != right_shapes.get(key):
            yield CheckpointDifference(key, str(left_shapes.get(key, "none")), str(right_shapes.get(key, "none")))
            continue
        left_tensor = left.whole(key)
        right_tensor = right.whole(key)
        if not torch.equal(left_tensor, right_tensor):
            difference = (left_tensor.double() - right_tensor.double()).norm().item()
            norm = left_tensor.double().norm().item()
            yield CheckpointDifference(
                key, f"norm {norm:.6g}", f"differs by {difference / max(norm, 1e-300):.2e} of it"
            )


def in_short(left_value: Any, right_value: Any) -> tuple[str, str]:
    """Describe two different values briefly.

    Two lists are described by their lengths, and the right description also says how the lists differ. A long text is
    cut to the part around the first difference.
    """
    if isinstance(left_value, Sequence) and isinstance(right_value, Sequence) and not isinstance(left_value, str):
        return f"{len(left_value)} values", f"{len(right_value)} values, {_list_differences(left_value, right_value)}"
    left = str(left_value)
    right = str(right_value)
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return _around(left, same), _around(right, same)


def _list_differences(left: Sequence[Any], right: Sequence[Any]) -> str:
    """Describe how two lists differ: how many entries differ, the largest difference, and the first pair.

    Entries are compared up to the shorter list's end. The largest difference is given only if all differing entries are
    numbers.
    """
    differing = [at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
    if not differing:
        return f"the first {min(len(left), len(right))} the same"
    at = differing[0]
    first = f"first different at {at}: {_around(str(left[at]), 0)} and {_around(str(right[at]), 0)}"
    pairs = [(left[at], right[at]) for at in differing]
    if any(not isinstance(value, int | float) for pair in pairs for value in pair):
        return f"{len(differing)} different, {first}"
    largest = max(abs(a - b) for a, b in pairs)
    return f"{len(differing)} different by at most {largest:.3g}, {first}"


def _around(text: str, position: int) -> str:
    """Cut a long text to the part around a position."""
    if len(text) <= MAX_CHARACTERS:
        return text
    start = max(0, min(position - MAX_CHARACTERS // 4, len(text) - MAX_CHARACTERS))
    end = start + MAX_CHARACTERS
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def _settings(left: Checkpoint, right: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, left value, right value) for every metadata field and every setting.

    A setting's name is its dotted key in config.yaml.
    """
    right_meta: dict[str, Any] = dataclasses.asdict(right.meta)
    for name, value in dataclasses.asdict(left.meta).items():
        other = right_meta[name]
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
    """Write a copy of a checkpoint with full tensors; return how many files have tensors.

    A file has at most `file_size` bytes for tensors, but a tensor that is larger gets its own file. The folder `target`
    appears complete or not at all. Before a file's tensors are read, `progress` is called with two numbers: how many
    files have been read so far, and how many there are.
    """
    planned = list(planned_files(source, file_size))

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
    """Write a checkpoint with full tensors into an existing folder, from a single process.

    `small` maps the names of files without tensors to their contents. `tensors` yields each tensor file's name and the
    file's tensors by key.
    """
    files: dict[str, File] = {name: write_bytes(folder / name, stored) for name, stored in small.items()}
    chunks: list[StoredShard] = []
    for name, of_file in prefetched(iter(tensors)):
        blocks = [block(key, t.shape, (0,) * t.dim(), t, main=True) for key, t in of_file.items()]
        files[name], new_chunks = write_tensors(folder / name, blocks)
        chunks += new_chunks
    write_bytes(folder / FILE, to_bytes(CheckpointManifest(meta, files, tuple(chunks))))


def planned_files(source: Checkpoint, file_size: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each file to write: its name and its tensors' keys.

    Each file has tensors of one kind: the part before the dash in the source's file names, such as `model`.
    """
    kinds: dict[str, dict[str, int]] = {}
    for chunk in source.manifest.chunks:
        size = math.prod(chunk.shape) * NAMES[chunk.dtype].itemsize
        kinds.setdefault(chunk.file.partition("-")[0], {})[chunk.key] = size
    for kind, sizes in kinds.items():
        for number, keys in enumerate(in_parts(sizes, sizes.__getitem__, file_size)):
            yield f"{kind}-{number:05}.safetensors", keys
