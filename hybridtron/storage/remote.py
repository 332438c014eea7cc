"""Readers of folders by URL or path: local, in an S3-compatible bucket, or in a store read by mosaicml-streaming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

from hybridtron.safe_open import path_inside
from hybridtron.storage.mosaic import CLIENTS, MosaicStore
from hybridtron.storage.retry import RetryPolicy, StorageError
from hybridtron.storage.s3 import Bucket


class Remote(Protocol):
    """Reader of a folder that is local or in a store. `patience` is the retry policy for requests."""

    patience: RetryPolicy

    def bring(self, name: str, into: Path) -> Path:
        """Return the local path of a file, given its relative name.

        A file in a store is first downloaded to `into`, which is then returned. A local file is not copied. This is
        one attempt; `retry.with_retries` makes further attempts.
        """
        ...


class LocalFolder:
    """A local folder, whose files are read without a copy.

    There are no retries, since a local error such as a missing file would occur again at the next attempt.
    """

    def __init__(self, path: Path, patience: RetryPolicy) -> None:
        self.path, self.patience = path, replace(patience, retries=0)

    def bring(self, name: str, into: Path) -> Path:
        return inside(self.path, name)


def is_url(path: str) -> bool:
    """Return True if `path` is a URL, and False if it is a local path."""
    return "://" in path


def remote_of(place: str, patience: RetryPolicy, retried: bool = False) -> Remote:
    """Return the reader for a folder, given as a URL or a local path. Raise StorageError for an unknown URL scheme.

    retried: True if failed reads from a local folder are repeated, because its shared file system may be busy
    """
    if not is_url(place):
        local = LocalFolder(Path(place), patience)
        if retried:
            local.patience = patience
        return local
    scheme = urlparse(place).scheme
    if scheme == "s3":
        return Bucket(place, patience)
    if scheme in CLIENTS:
        return MosaicStore(place, patience)
    schemes = ", ".join(f"{name}://" for name in ("s3", *CLIENTS))
    raise StorageError(f"has the unknown URL scheme {scheme}://; use one of {schemes}")


def inside(root: Path, relative: str) -> Path:
    """Return the path of `relative` below `root`; raise StorageError if it leads outside or has a symbolic link."""
    path = path_inside(root, relative)
    if path is None:
        raise StorageError(
            f"is not opened: the path {relative!r} leads out of the folder {root}, or contains a symbolic link"
        )
    return path
