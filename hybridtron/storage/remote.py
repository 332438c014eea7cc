"""Places to fetch files from: a local folder, an S3-compatible bucket, or a store that mosaicml-streaming reads."""

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
    """A place that holds files by relative name, with the retry policy for its requests."""

    patience: Patience

    def bring(self, name: str, into: Path) -> Path:
        """Make a file readable and return its path: `into`, or its own place if it is local.

        This is one attempt; see `attempts.attempted`.
        """
        ...


class LocalFolder:
    """A local folder, whose files are read in place. Its faults are permanent, so each request is tried once."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self.path, self.patience = path, replace(patience, retries=0)

    def bring(self, name: str, into: Path) -> Path:
        return inside(self.path, name)


def is_url(path: str) -> bool:
    """Return True for a URL, which has to be fetched, and False for a local path."""
    return "://" in path


def remote_of(place: str, patience: Patience) -> Remote:
    """Return the reader of a URL or a local path; raise StorageError if the URL's scheme is unknown."""
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
    """Return the path of a file below `root`; raise StorageError if it leads outside or contains a symbolic link."""
    path = path_inside(root, relative)
    if path is None:
        raise StorageError(f"{root} names {relative!r}, which leads, or could lead, out of the folder: not opened")
    return path
