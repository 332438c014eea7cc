"""Bringing files into the cache: download, decompress and hold against the manifest, in bounded time.

mosaicml-streaming's Stream downloads; when to stop, what to try again and what may get its final name is decided here.
Its clients bound one wait for the network, not the number of waits: a store that sends a byte a second would be
listened to for ever. So every attempt runs in a thread of its own that is given up when its time is over; what such a
thread still writes lies in a folder that nobody looks at. A local folder is read once: its faults do not pass.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlparse

from hybridtron.data.folder import DataManifest, DataShard, FolderError, digest_of, is_url
from hybridtron.data.store.cache import PAUSE, CacheOptions, Damaged, DataError, Entry, disk_trouble, inside
from hybridtron.data.store.unpack import unpacked
from hybridtron.regular_files import Unreadable, read_regular

if TYPE_CHECKING:
    from hybridtron.data.store.mosaic import Stream

Result = TypeVar("Result")
CLIENTS = {
    "s3": "boto3",
    "gs": "google-cloud-storage",
    "oci": "oci",
    "azure": "azure-storage-blob azure-identity",
    "azure-dl": "azure-storage-file-datalake azure-identity",
    "hf": "huggingface-hub",
    "sftp": "paramiko",
    "dbfs": "databricks-sdk",
    "alipan": "AliPCS-Py",
}  # scheme -> what pip installs for it
_ABSENT = {"403", "404", "AccessDenied", "NoSuchBucket", "NoSuchKey"}


def check_scheme(url: str) -> None:
    """FolderError if there is no client for such a URL."""
    from hybridtron.data.store.mosaic import DOWNLOADERS  # imports torch

    scheme = urlparse(url).scheme
    if scheme not in DOWNLOADERS:
        known = ", ".join(f"{name}://" for name in sorted(DOWNLOADERS) if name in CLIENTS)
        raise FolderError(url, f"starts with {scheme}://, for which there is no client; {known} are known")


class Streams:
    """Clients of one dataset's store that are connected, each used by one attempt at a time."""

    def __init__(self, remote: str, timeout: float) -> None:
        self.remote, self.timeout = remote, timeout
        self._idle: list[Stream] = []
        self._owner = os.getpid()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_idle": []}

    @contextmanager
    def one(self, folder: Path) -> Iterator[Stream]:
        """A stream into a folder. One that failed, or that nobody waits for any more, is not used again."""
        if self._owner != os.getpid():  # a forked process has its parent's connections, and would mix up the answers
            self._idle, self._owner = [], os.getpid()
        try:
            stream = self._idle.pop()
        except IndexError:
            from hybridtron.data.store.mosaic import Stream  # imports torch

            stream = Stream(
                remote=self.remote,
                local=str(folder),
                download_retry=1,
                download_timeout=self.timeout,
            )
        stream.local = str(folder)
        yield stream
        self._idle.append(stream)


def persistently(options: CacheOptions, size: int, scheme: str, attempt: Callable[[], Result]) -> Result:
    """What an attempt gives; it is made again while its failure may pass, and DataError says what the last one was."""
    begin = time.monotonic()
    for number in range(options.retries + 1):
        try:
            return bounded(options.deadline(size), attempt, " (data.timeout)")
        except DataError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and disk_trouble(options, error, size):
                raise
            if number == options.retries or not scheme or _is_final(error):  # what lies here stays as it is
                took = f"{number + 1} {'attempts' if number else 'attempt'}, {time.monotonic() - begin:.1f} s"
                raise DataError(f"can't be fetched ({took}): {_described(error, scheme)}") from error
        time.sleep(min(PAUSE, options.timeout / 4))
    raise AssertionError("at least one attempt is made")


def fetch_file(
    entry: Entry, streams: Streams, name: str, size: int, fault: Callable[[bytes], str | None], anew: bool = False
) -> Path:
    """One of a dataset's files in the cache, fetched unless what is there is without fault."""

    def attempt() -> Path:
        with streams.one(staging / secrets.token_hex(8)) as stream:
            ready = Path(stream._download_file(name))
        if found := fault(ready.read_bytes()):
            raise Damaged(found)
        return ready

    with _told_of_disk(entry.options, size), entry.lock(name, 2 * entry.options.patience(size)):
        path = inside(entry.root, name)
        if not anew and path.is_file() and fault(path.read_bytes()) is None:
            return path
        with entry.staging(name) as staging:
            ready = persistently(entry.options, size, urlparse(streams.remote).scheme, attempt)
            path.parent.mkdir(parents=True, exist_ok=True)
            ready.replace(inside(entry.root, name))
        return path


class Fetcher:
    """Makes the shards of one source and split present in the cache. `remote` is a URL, or a local folder's path."""

    def __init__(self, entry: Entry, remote: str, manifest: DataManifest, where: str) -> None:
        self.entry, self.remote, self.manifest, self.where = entry, remote, manifest, where
        self._streams = Streams(remote, entry.options.timeout)

    def obtain(self, shard: DataShard, packed_digest: str | None) -> mmap:
        """The bytes of a shard, mapped, from the cache if they are there by now."""
        entry, key = self.entry, f"{self.where}/{shard.file}"
        size = shard.size + (shard.packed or 0)
        # Who holds the lock may first wait for room, then fetch.
        with _told_of_disk(entry.options, size), entry.lock(key, 2 * entry.options.patience(size)):
            path = inside(entry.root, key)
            try:
                return entry.open(path, key, shard)
            except (FileNotFoundError, Damaged):
                entry.forget(path, key)
            with entry.staging(key, size) as staging:
                ready, mapped = persistently(
                    entry.options,
                    size,
                    urlparse(self.remote).scheme,
                    lambda: self._attempt(staging, shard, packed_digest),
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                ready.replace(inside(entry.root, key))
            return mapped

    def _attempt(self, staging: Path, shard: DataShard, packed_digest: str | None) -> tuple[Path, mmap]:
        """Download, decompress and verify a shard once; where it then lies, and its bytes."""
        key, stored = f"{self.where}/{shard.file}", f"{self.where}/{self.manifest.stored_name(shard)}"
        aside = staging / secrets.token_hex(8)
        ready = aside / key
        if is_url(self.remote):
            with self._streams.one(aside) as stream:
                packed = Path(stream._download_file(stored))
        else:
            packed = inside(Path(self.remote), stored)
        if self.manifest.compression is not None:
            data = _unpacked(packed, self.manifest.compression, shard, packed_digest)
            ready.parent.mkdir(parents=True, exist_ok=True)
            ready.write_bytes(data)
        return ready, self.entry.open(ready, key, shard)  # the mark stays true under the file's new name


def _unpacked(packed: Path, compression: str, shard: DataShard, digest: str | None) -> bytes:
    """A compressed shard as it is read; Damaged where a byte of it is another one."""
    try:
        data = read_regular(packed, shard.packed or 0)
        if len(data) != shard.packed:
            raise Damaged("is empty" if not data else f"has {len(data)} of {shard.packed} bytes")
        if digest_of(data) != digest:
            raise Damaged("differs from its digest in the index")
        return unpacked(compression, data, shard.size)
    except (ValueError, Unreadable) as error:
        raise Damaged(str(error)) from error


def bounded(seconds: float, attempt: Callable[[], Result], setting: str = "") -> Result:
    """What an attempt gives, or TimeoutError; then it goes on in a thread for which nobody waits."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"not finished after {seconds:g} s{setting}") from error


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end the same way."""
    response = getattr(error, "response", None)  # of botocore's ClientError
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return isinstance(error, (ImportError, FileNotFoundError)) or code in _ABSENT


def _described(error: Exception, scheme: str) -> str:
    error = getattr(error, "last_exception", None) or error  # boto3's RetriesExceededError says nothing itself
    if isinstance(error, ImportError):
        return f"{error}" + (f"; `pip install {CLIENTS[scheme]}` brings its client" if scheme in CLIENTS else "")
    if isinstance(error, Damaged):
        return f"what came {error}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def _told_of_disk(options: CacheOptions, size: int) -> Iterator[None]:
    """Turn an error of the cache's disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        advice = disk_trouble(options, error, size)
        raise DataError(advice or f"can't be brought into the cache {options.folder}: {error}") from error
