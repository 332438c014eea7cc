"""Where files are brought from: a folder of this machine, an S3-compatible bucket, or what mosaicml-streaming reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

from hybridtron.regular_files import path_inside
from hybridtron.storage.attempts import Patience, StorageError
from hybridtron.storage.mosaic import CLIENTS, MosaicStore
from hybridtron.storage.s3 import Bucket


class Remote(Protocol):
    """A place that holds files by names below it, and how patient to be with it."""

    patience: Patience

    def bring(self, name: str, into: Path) -> Path:
        """Where the file can be read now: `into`, or where it lies already. One attempt; see `attempts.attempted`."""
        ...


class LocalFolder:
    """A folder of this machine, whose files are read where they lie. Its faults do not pass, so each is tried once."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self.path, self.patience = path, replace(patience, retries=0)

    def bring(self, name: str, into: Path) -> Path:
        return inside(self.path, name)


def is_url(path: str) -> bool:
    """Whether a folder has to be fetched from somewhere."""
    return "://" in path


def remote_of(place: str, patience: Patience) -> Remote:
    """What reads a URL or a local path; StorageError where nothing does."""
    if not is_url(place):
        return LocalFolder(Path(place), patience)
    scheme = urlparse(place).scheme
    if scheme == "s3":
        return Bucket(place, patience)
    if scheme in CLIENTS:
        return MosaicStore(place, patience)
    known = ", ".join(f"{name}://" for name in ("s3", *CLIENTS))
    raise StorageError(f"starts with {scheme}://, for which there is no client; {known} are known")


def inside(root: Path, relative: str) -> Path:
    """A file below a folder, by a path in which nothing is a symbolic link; StorageError otherwise."""
    path = path_inside(root, relative)
    if path is None:
        raise StorageError(f"{root} names {relative!r}, which leads, or could lead, out of the folder: not opened")
    return path
