"""Opens folders of prepared tokens by path or URL.

From a URL, all files except shards are downloaded into the cache, and their digests are verified. A local folder is
read in place, or copied into the cache in the same way. The copy saves repeated reads from a shared disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.manifest import USUAL, DataManifest
from hybridtron.storage.cache import CacheEntry, CacheOptions
from hybridtron.storage.digest import digest_of
from hybridtron.storage.fetch import Wanted, fetch_file
from hybridtron.storage.remote import is_url, remote_of
from hybridtron.storage.retry import Damaged, StorageError

Opened = TypeVar("Opened")


def open_folder(path: str, cache: CacheOptions, checked: bool = False, copied: bool = False) -> TokenFolder:
    """Open a prepared folder by its path or URL; raise FolderError if it can't be used.

    checked: True if another process of this machine has just opened the path, and compares sizes and digests
    copied: True if a local folder is copied into the cache; a shard is copied at the latest when it is first used
    """
    if is_url(path):
        folder = _fetch_folder(path.rstrip("/"), cache)
    elif not copied:
        folder = TokenFolder.open(Path(path), checked)
    else:
        folder = _copied_folder(str(Path(path).resolve()), cache, checked)
    check_limit(folder, cache)
    return folder


def _copied_folder(path: str, cache: CacheOptions, checked: bool) -> TokenFolder:
    """Copy all files of a local folder except its shards into the cache; with `checked`, read the existing copy."""
    if not checked:
        return _fetch_folder(path, cache)
    try:
        return replace(TokenFolder.unchecked(CacheEntry(cache, path).root), remote=path, checked=True)
    except OSError as error:
        raise FolderError(path, f"has no copy in {cache.folder} ({cache.key}): {error}") from error


def check_limit(folder: TokenFolder, cache: CacheOptions) -> None:
    """Raise FolderError if `data.cache_limit` is so small that shards would be evicted before they are read."""
    manifest = folder.manifest
    if cache.limit is None or (folder.remote is None and manifest.compression is None):
        return
    largest = max((shard.size + (shard.packed or 0) for _, shard in manifest.shards()), default=0)
    if cache.limit < 4 * largest:
        raise FolderError(
            folder.name,
            f"has shards that occupy up to {largest} bytes each, and data.cache_limit={cache.limit} has no room for 4: "
            f"set data.cache_limit to {4 * largest} or more",
            code="out-of-range",
        )


def _fetch_folder(url: str, cache: CacheOptions) -> TokenFolder:
    """Download all files of a remote folder except its shards, and return the opened folder.

    The manifest is always downloaded again. Any other file is downloaded only if the cache has no copy with the digest
    in the manifest.
    """
    entry = CacheEntry(cache, url)
    try:
        remote = remote_of(url, cache.patience, retried=True)
    except StorageError as error:
        raise FolderError(url, str(error), code="unsupported") from error

    def fetch(name: str, size: int, opened: Callable[[Path], Opened], again: bool = False) -> Opened:
        try:
            return fetch_file(entry, remote, Wanted(name, name, size, opened), evictable=False, again=again)
        except StorageError as error:
            raise FolderError(url, f"can't be opened: {name} {error}") from error

    text = fetch("manifest.json", USUAL, _json_text, again=True)
    manifest = DataManifest.parse(text, url)
    for name, (digest, size) in manifest.beside.items():
        fetch(name, size, partial(_check_digest, digest))
    return TokenFolder(entry.root, manifest, digest_of(text.encode()), remote=url)


def _json_text(path: Path) -> str:
    """Return a JSON file's text; raise Damaged if it does not parse."""
    text = path.read_bytes()
    try:
        json.loads(text)
        return text.decode()
    except ValueError as error:
        raise Damaged(f"is not JSON: {error}") from error


def _check_digest(digest: str, path: Path) -> None:
    """Raise Damaged unless the file has this digest."""
    if digest_of(path.read_bytes()) != digest:
        raise Damaged("differs from its digest in the manifest")
