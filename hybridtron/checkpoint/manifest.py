"""What a checkpoint holds, and the digest of every byte of it: the file `manifest.json`.

    {"digest": "32 hex digits", "content": {...}}           the digest is of the bytes of the content, as they stand

The content lists every file with its size and the digest of its head, and every chunk of a tensor: which rectangle of
which whole tensor it is, where its bytes lie, and their digest. Heads (whole files where they hold no tensors) and
chunks cover every byte. Digests are XXH3 of 128 bits: they find what disks, memory and people do by accident.
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
GREATEST = 2**30  # bytes of a manifest: some 5 million chunks
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""By format, what turns the content of a manifest of that format into the next one's."""

_HEAD, _BETWEEN, _END = b'{"digest": "', b'", "content": ', b"}\n"


_NAME = re.compile(r"step-(\d{8,})")


class BrokenCheckpoint(ValueError):
    """A checkpoint, or a file of it, is not as it was written."""


@dataclass(frozen=True)
class Meta:
    """Where training stood when the checkpoint was written."""

    step: int
    accepted_steps: int
    data: Fingerprint
    layout: str
    torch_version: str
    validation: float | None = None  # loss at the training length, where it was measured at this step
    norms: list[float] = field(default_factory=list)  # of the last accepted gradients, which the next are compared with
    refused: int = 0  # steps in a row up to this one
    windows: list[list[int]] = field(default_factory=list)  # of data that was left out: phase, first step, step after


@dataclass(frozen=True)
class File:
    """A file: its size, how many bytes at its start stand before its chunks, and the digest of these."""

    size: int
    head: int
    digest: str


class StoredShard(NamedTuple):
    """A rectangle of a whole tensor: `size` entries from `offset` on, stored from byte `start` of a file on."""

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
    """All of it."""

    meta: Meta
    files: dict[str, File]
    chunks: tuple[StoredShard, ...]

    def incomplete(self) -> list[str]:
        """The tensors of which something is missing, or there twice."""
        held: dict[str, int] = {}
        wanted: dict[str, int] = {}
        for chunk in self.chunks:
            held[chunk.key] = held.get(chunk.key, 0) + math.prod(chunk.size)
            wanted[chunk.key] = math.prod(chunk.shape)
        return [key for key, size in wanted.items() if held[key] != size]


def name_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """The step whose checkpoint can be called so."""
    matched = _NAME.fullmatch(name)
    return None if matched is None else int(matched[1])


def to_bytes(manifest: CheckpointManifest) -> bytes:
    content = {
        "format": FORMAT,
        "meta": asdict(manifest.meta),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "chunks": manifest.chunks,
    }
    body = json.dumps(content).encode()
    return _HEAD + digest_of(body).encode() + _BETWEEN + body + _END


def read(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises BrokenCheckpoint where it is not what was written, or not of this step."""
    found = of_bytes(stored_in(folder), folder / FILE)
    if step_in(folder.name) is not None and folder.name != name_of(found.meta.step):
        raise BrokenCheckpoint(f"{folder} holds step {found.meta.step}: it was renamed")
    return found


def stored_in(folder: Path) -> bytes:
    """The bytes of a checkpoint's manifest, as they are found."""
    path = folder / FILE
    try:
        return read_regular(path, GREATEST)
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{folder} has no {FILE}: it is incomplete{_older(folder)}") from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} can't be read: {error}") from error


def of_bytes(stored: bytes, path: Path) -> CheckpointManifest:
    """The manifest that bytes hold, which were read from a path."""
    at = len(_HEAD) + 32
    body = stored[at + len(_BETWEEN) : -len(_END)]
    whole = _HEAD + digest_of(body).encode() + _BETWEEN + body + _END
    if stored != whole:
        raise BrokenCheckpoint(f"{path} is not as it was written: its digest differs")
    try:
        content = migrated(json.loads(body), path)
        files = {name: File(**file) for name, file in content["files"].items()}
        found = CheckpointManifest(
            Meta(**content["meta"]), files, tuple(chunk_of(values) for values in content["chunks"])
        )
    except BrokenCheckpoint:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} does not say what a manifest says: {error!r}") from error
    if outside := [name for name in files if "/" in name or name in ("", ".", "..")]:
        raise BrokenCheckpoint(f"{path} names {outside[0]!r}, which is no file of the checkpoint")
    if strays := {chunk.file for chunk in found.chunks} - files.keys():
        raise BrokenCheckpoint(f"{path} has chunks in {min(strays)!r}, which it does not list")
    return found


def migrated(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content in today's format."""
    written = content["format"]
    while content["format"] in MIGRATIONS:
        content = MIGRATIONS[content["format"]](content)
    if content["format"] != FORMAT:
        raise BrokenCheckpoint(f"{path} has checkpoint format {written}; this version reads up to {FORMAT}")
    return content


def chunk_of(values: Sequence[Any]) -> StoredShard:
    key, dtype, shape, offset, size, file, start, of_bytes = values
    return StoredShard(key, dtype, tuple(shape), tuple(offset), tuple(size), file, start, of_bytes)


def _older(folder: Path) -> str:
    return ", or has a format before 3, which this version does not read" if (folder / "meta.json").exists() else ""
