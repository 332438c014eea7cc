"""A checkpoint's manifest (`manifest.json`): a list of the checkpoint's files and tensors, with digests.

    {"digest": "32 hex digits", "content": {"format": 3, "meta": {...}, "files": {...}, "chunks": [...]}}

The first digest covers the bytes after `"content": ` and before the last brace.

- `files`: each file's size, and its head's size and digest. The head is the part before the first tensor; in
  a file without tensors it is the entire file.
- `chunks`: a chunk is a rectangle in a tensor. For each chunk: the file and the position where its bytes are stored,
  and their digest.

Heads and chunks together cover every byte of every file. Digests are 128-bit XXH3. They detect accidental damage, not
deliberate changes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybridtron.data.loader import Fingerprint
from hybridtron.problems import Code
from hybridtron.safe_open import read_regular
from hybridtron.storage.digest import digest_of

FORMAT = 3
FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**30  # largest manifest that is read: enough for some 5 million chunks
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Functions by format number N. Each converts a manifest's content from format N to format N + 1."""

_HEAD = b'{"digest": "'
_BETWEEN = b'", "content": '
_END = b"}\n"
_NAME = re.compile(r"step-(\d{8,})")


class BrokenCheckpoint(ValueError):
    """Raised when a checkpoint's contents are not as they were written."""

    def __init__(self, message: str, *, code: Code = "unreadable") -> None:
        super().__init__(message)
        self.code: Code = code


@dataclass(frozen=True)
class Meta:
    """Training progress when the checkpoint was written.

    step: how many steps the run has made so far
    accepted_steps: how many of these steps changed the weights
    data: name -> description of a property of the training data; a resumed run compares the descriptions
    layout: the parallel layout, as text
    """

    step: int
    accepted_steps: int
    data: Fingerprint
    layout: str
    torch_version: str
    validation: float | None = None  # held-out loss at the training length, if it was measured at this step
    norms: list[float] = field(default_factory=list)  # gradient norms of the last accepted steps, for the step guard
    refused: int = 0  # how many steps in a row, up to this step, the step guard has refused
    windows: list[list[int]] = field(default_factory=list)  # skipped data, each [phase, first step, last step + 1]


@dataclass(frozen=True)
class File:
    """A file's entry in the manifest.

    size: bytes in the file
    head: bytes before its first tensor; all bytes if the file has no tensors
    digest: digest of these first `head` bytes
    """

    size: int
    head: int
    digest: str


class StoredShard(NamedTuple):
    """A rectangle in a full tensor, as it is stored in a file.

    key: the full tensor's name
    dtype: the dtype's name in safetensors files, such as `BF16`
    shape: the full tensor's shape
    offset: the rectangle's first index on each axis of the full tensor
    size: the rectangle's shape
    file: the file's name
    start: the position in the file at which the rectangle begins
    digest: the digest over the rectangle's bytes
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    digest: str


@dataclass(frozen=True)
class CheckpointManifest:
    """A manifest's full content."""

    meta: Meta
    files: dict[str, File]
    chunks: tuple[StoredShard, ...]

    def incomplete(self) -> list[str]:
        """Return the keys of tensors whose chunks together have more or fewer elements than the full tensor."""
        stored_sizes: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for chunk in self.chunks:
            stored_sizes[chunk.key] = stored_sizes.get(chunk.key, 0) + math.prod(chunk.size)
            sizes[chunk.key] = math.prod(chunk.shape)
        return [key for key, size in sizes.items() if stored_sizes[key] != size]


def name_of(step: int) -> str:
    """Return the folder name for a step's checkpoint, such as `step-00000100`."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step in a folder's name such as `step-00000100`, or None for another name."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        return None
    return int(matched[1])


def to_bytes(manifest: CheckpointManifest) -> bytes:
    """Serialize a manifest, with its digest in front."""
    content = {
        "format": FORMAT,
        "meta": asdict(manifest.meta),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "chunks": manifest.chunks,
    }
    body = json.dumps(content).encode()
    return _HEAD + digest_of(body).encode() + _BETWEEN + body + _END


def read(folder: Path, stored: bytes | None = None) -> CheckpointManifest:
    """Read and verify a checkpoint's manifest; `stored` has its bytes if they were read before.

    Raises BrokenCheckpoint if the manifest is missing or damaged, or if the folder's name has another step.
    """
    manifest = of_bytes(stored_in(folder) if stored is None else stored, folder / FILE)
    if step_in(folder.name) is not None and folder.name != name_of(manifest.meta.step):
        raise BrokenCheckpoint(
            f"{folder} is a checkpoint of step {manifest.meta.step}; rename it to {name_of(manifest.meta.step)}",
            code="changed",
        )
    return manifest


def stored_in(folder: Path) -> bytes:
    """Read a manifest's bytes without verifying them. Raises BrokenCheckpoint if the file can't be read."""
    path = folder / FILE
    try:
        return read_regular(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{folder} has no {FILE}: it is incomplete{_or_old(folder)}", code="no-file") from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} can't be read: {error}") from error


def of_bytes(stored: bytes, path: Path) -> CheckpointManifest:
    """Parse and verify a manifest's bytes. `path` appears in messages only.

    Raises BrokenCheckpoint if the digest differs, or if the content is not a manifest's.
    """
    digest_end = len(_HEAD) + 32
    body = stored[digest_end + len(_BETWEEN) : -len(_END)]
    expected = _HEAD + digest_of(body).encode() + _BETWEEN + body + _END
    if stored != expected:
        raise BrokenCheckpoint(f"{path} is damaged: the content differs from its digest")
    try:
        content = migrate(json.loads(body), path)
        files = {name: File(**file) for name, file in content["files"].items()}
        manifest = CheckpointManifest(
            Meta(**content["meta"]), files, tuple(chunk_of(values) for values in content["chunks"])
        )
    except BrokenCheckpoint:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} is not the manifest of a checkpoint: {error!r}") from error
    if type(manifest.meta.step) is not int or manifest.meta.step < 0:
        raise BrokenCheckpoint(f"{path} has the step {manifest.meta.step!r}, which is not a number from 0")
    if outside := [name for name in files if "/" in name or name in ("", ".", "..")]:
        raise BrokenCheckpoint(f"{path} lists the file {outside[0]!r}, which is outside the checkpoint")
    if unlisted := {chunk.file for chunk in manifest.chunks} - files.keys():
        raise BrokenCheckpoint(f"{path} lists chunks of the file {min(unlisted)!r}, but not the file")
    return manifest


def migrate(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert a manifest's content to the current format. Raises BrokenCheckpoint if no conversion is known."""
    format_number = content["format"]
    while content["format"] in MIGRATIONS:
        content = MIGRATIONS[content["format"]](content)
    if content["format"] != FORMAT:
        raise BrokenCheckpoint(
            f"{path} has checkpoint format {format_number}; this version reads format {FORMAT}", code="unsupported"
        )
    return content


def chunk_of(values: Sequence[Any]) -> StoredShard:
    """Build a chunk from its JSON list, which has the fields of `StoredShard` in order."""
    key, dtype, shape, offset, size, file, start, digest = values
    return StoredShard(key, dtype, tuple(shape), tuple(offset), tuple(size), file, start, digest)


def _or_old(folder: Path) -> str:
    """Return a second explanation of a missing manifest, if the folder may be a checkpoint of format 1 or 2."""
    if (folder / "meta.json").exists():
        return ", or has a format before 3, which this version does not read"
    return ""
