"""The manifest of a checkpoint (`manifest.json`): its files and tensor chunks, with their digests.

    {"digest": "32 hex digits", "content": {...}}           the digest covers the content's bytes, exactly as stored

The content lists every file with its size and its head's digest. It also lists every tensor chunk: the rectangle of the
full tensor, the position where its bytes are stored, and their digest. A head is everything before a file's first
chunk; in a file without tensors it is the entire file. Heads and chunks together cover every byte. Digests are 128-bit
XXH3: they detect accidental damage by disks, memory and people, not deliberate changes.
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
from hybridtron.regular_files import read_regular
from hybridtron.storage.digest import digest_of

FORMAT = 3
FILE = "manifest.json"
GREATEST = 2**30  # largest manifest that is read, in bytes: enough for some 5 million chunks
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Functions by format number; each converts a manifest's content from that format to the next one."""

_HEAD = b'{"digest": "'
_BETWEEN = b'", "content": '
_END = b"}\n"


_NAME = re.compile(r"step-(\d{8,})")


class BrokenCheckpoint(ValueError):
    """Raised when a checkpoint's contents are not as they were written."""


@dataclass(frozen=True)
class Meta:
    """Training progress when the checkpoint was written."""

    step: int
    accepted_steps: int
    data: Fingerprint
    layout: str
    torch_version: str
    validation: float | None = None  # held-out loss at the training length, if it was measured at this step
    norms: list[float] = field(default_factory=list)  # gradient norms of the last accepted steps, for the step guard
    refused: int = 0  # refused steps in a row, up to this step
    windows: list[list[int]] = field(default_factory=list)  # skipped data: [phase, first step, last step + 1]


@dataclass(frozen=True)
class File:
    """A file's entry in the manifest: `head` bytes come before its first chunk, and `digest` is their digest."""

    size: int
    head: int
    digest: str


class StoredShard(NamedTuple):
    """A rectangle of a full tensor, as it is stored in a file.

    It has `size` entries from `offset` on; `shape` is the full tensor's. Its bytes begin at byte `start` in the file.
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
        """Return the keys of tensors whose chunks together have more or fewer entries than the tensor."""
        stored_sizes: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for chunk in self.chunks:
            stored_sizes[chunk.key] = stored_sizes.get(chunk.key, 0) + math.prod(chunk.size)
            sizes[chunk.key] = math.prod(chunk.shape)
        return [key for key, size in sizes.items() if stored_sizes[key] != size]


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step in a checkpoint's folder name, or None if it is not such a name."""
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


def read(folder: Path) -> CheckpointManifest:
    """Read and verify a checkpoint's manifest.

    Raises BrokenCheckpoint if it is damaged or incomplete, or if the folder carries another step's name.
    """
    manifest = of_bytes(stored_in(folder), folder / FILE)
    if step_in(folder.name) is not None and folder.name != name_of(manifest.meta.step):
        raise BrokenCheckpoint(f"{folder} holds step {manifest.meta.step}: it was renamed")
    return manifest


def stored_in(folder: Path) -> bytes:
    """Read a manifest's bytes without verifying them. Raises BrokenCheckpoint if that fails."""
    path = folder / FILE
    try:
        return read_regular(path, GREATEST)
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{folder} has no {FILE}: it is incomplete{_older(folder)}") from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} can't be read: {error}") from error


def of_bytes(stored: bytes, path: Path) -> CheckpointManifest:
    """Parse and verify a manifest's bytes. `path` appears in messages only.

    Raises BrokenCheckpoint if the digest differs, or if the content does not make a valid manifest.
    """
    digest_end = len(_HEAD) + 32
    body = stored[digest_end + len(_BETWEEN) : -len(_END)]
    whole = _HEAD + digest_of(body).encode() + _BETWEEN + body + _END
    if stored != whole:
        raise BrokenCheckpoint(f"{path} is not as it was written: its digest differs")
    try:
        content = migrated(json.loads(body), path)
        files = {name: File(**file) for name, file in content["files"].items()}
        manifest = CheckpointManifest(
            Meta(**content["meta"]), files, tuple(chunk_of(values) for values in content["chunks"])
        )
    except BrokenCheckpoint:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} does not say what a manifest says: {error!r}") from error
    if outside := [name for name in files if "/" in name or name in ("", ".", "..")]:
        raise BrokenCheckpoint(f"{path} names {outside[0]!r}, which is not a file of the checkpoint")
    if strays := {chunk.file for chunk in manifest.chunks} - files.keys():
        raise BrokenCheckpoint(f"{path} has chunks in {min(strays)!r}, which it does not list")
    return manifest


def migrated(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert a manifest's content to the current format. Raises BrokenCheckpoint if its format is not known."""
    format_number = content["format"]
    while content["format"] in MIGRATIONS:
        content = MIGRATIONS[content["format"]](content)
    if content["format"] != FORMAT:
        raise BrokenCheckpoint(f"{path} has checkpoint format {format_number}; this version reads up to {FORMAT}")
    return content


def chunk_of(values: Sequence[Any]) -> StoredShard:
    """Build a chunk from its list of values in JSON."""
    key, dtype, shape, offset, size, file, start, of_bytes = values
    return StoredShard(key, dtype, tuple(shape), tuple(offset), tuple(size), file, start, of_bytes)


def _older(folder: Path) -> str:
    if (folder / "meta.json").exists():
        return ", or has a format before 3, which this version does not read"
    return ""
