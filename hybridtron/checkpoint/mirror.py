"""Copies of finished checkpoints in an S3-compatible store, and the way back.

    s3://BUCKET/PREFIX/step-00000100/...    a checkpoint; its manifest is uploaded last, without which it is none
    s3://BUCKET/PREFIX/latest               the name of the newest, and the digest of its manifest

What was uploaded is read back and held against the manifest before the manifest follows. Uploading happens in a thread
of the first process; while it is busy the newest checkpoint waits, and one that is overtaken is left out. A copy that
fails is told and tried again with the next checkpoint. Nothing is removed from the store: its own rules can do that.
Credentials come from where boto3 finds them, the address of stores other than Amazon's from S3_ENDPOINT_URL.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.files import appearing, write_bytes
from hybridtron.checkpoint.manifest import FILE, BrokenCheckpoint, CheckpointManifest
from hybridtron.data.store.fetch import bounded

Result = TypeVar("Result")
AT_ONCE = 8 * 2**20  # bytes
ATTEMPTS = 4  # at each request
PATIENCE_S = 300.0  # for all of them; what comes a byte a second would never time out by itself
SLOWEST = 2**17  # bytes a second, beyond that
TROUBLE = (Boto3Error, BotoCoreError, ClientError, HTTPError, OSError, ResponseParserError)


class Store:
    """The place in a bucket that a URL names."""

    def __init__(self, url: str) -> None:
        parsed = urlparse(url)
        self.url, self.bucket, self.prefix = url.rstrip("/"), parsed.netloc, parsed.path.strip("/")
        needed: Any = "when_required"  # other stores than Amazon's do not know the checksums of today's clients
        self._client = boto3.client(
            "s3",
            endpoint_url=os.environ.get("S3_ENDPOINT_URL"),
            config=ClientConfig(
                connect_timeout=20,
                read_timeout=60,
                retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
                request_checksum_calculation=needed,
                response_checksum_validation=needed,
            ),
        )

    def key(self, *names: str) -> str:
        return "/".join(filter(None, (self.prefix, *names)))

    def put(self, stored: bytes, *names: str) -> None:
        _in_time(len(stored), lambda: self._client.put_object(Bucket=self.bucket, Key=self.key(*names), Body=stored))

    def put_file(self, path: Path, *names: str) -> None:
        _in_time(path.stat().st_size, lambda: self._client.upload_file(str(path), self.bucket, self.key(*names)))

    def get(self, *names: str) -> Iterator[bytes]:
        body = _in_time(0, lambda: self._client.get_object(Bucket=self.bucket, Key=self.key(*names)))["Body"]
        while piece := _in_time(AT_ONCE, lambda: body.read(AT_ONCE)):
            yield piece

    def small(self, limit: int, *names: str) -> bytes | None:
        """The whole of an object, None where there is none. Raises BrokenCheckpoint where it has more bytes."""
        stored = bytearray()
        try:
            for piece in self.get(*names):
                stored += piece
                if len(stored) > limit:
                    raise BrokenCheckpoint(f"{self.url}/{'/'.join(names)} has more than {limit:,} bytes")
            return bytes(stored)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise


class Mirror:
    """Keeps a store up to date with the checkpoints of a run."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self.busy: Path | None = None  # what is being read, which must not be removed
        self._thread: threading.Thread | None = None

    def offer(self, folder: Path) -> None:
        """Upload a checkpoint, now or as soon as the one before it has arrived."""
        with self._lock:
            if self._waiting is not None:
                print(f"{self.store.url}: {self._waiting.name} is left out for {folder.name}", file=sys.stderr)
            self._waiting = folder
            if self.busy is None:
                self.busy, self._waiting = folder, None
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until everything that was offered has arrived, or failed."""
        if self._thread is not None:
            self._thread.join()

    def in_use(self) -> set[Path]:
        """The checkpoints that are being uploaded or wait for it."""
        with self._lock:
            return {folder for folder in (self.busy, self._waiting) if folder is not None}

    def _work(self) -> None:
        while self.busy is not None:
            try:
                upload(self.store, self.busy)
            except Exception as error:  # whatever it is: the next checkpoint is tried, and training goes on
                said = f"{type(error).__name__}: {error}"
                print(f"NOT MIRRORED: {self.busy} to {self.store.url}: {said}", file=sys.stderr)
            with self._lock:
                self.busy, self._waiting = self._waiting, None


def _in_time(size: int, request: Callable[[], Result]) -> Result:
    """What a request gives, or TimeoutError where so many bytes should long have arrived."""
    return bounded(PATIENCE_S + size / SLOWEST, request)


def upload(store: Store, folder: Path) -> None:
    """Copy a checkpoint, read the copy back, and only then make it one. Raises BrokenCheckpoint where it differs."""
    stored = manifest.stored_in(folder)
    found = manifest.of_bytes(stored, folder / FILE)
    if store.small(manifest.GREATEST, folder.name, FILE) != stored:
        for name in found.files:
            store.put_file(folder / name, folder.name, name)
            for _ in verified(store.get(folder.name, name), found, name, f"{store.url}/{folder.name}/{name}"):
                pass
        store.put(stored, folder.name, FILE)
        if store.small(manifest.GREATEST, folder.name, FILE) != stored:
            raise BrokenCheckpoint(f"{store.url}/{folder.name}/{FILE} is not as it was written")
    store.put(f"{folder.name} {manifest.digest(stored)}\n".encode(), folders.POINTER)


def verified(arriving: Iterator[bytes], found: CheckpointManifest, name: str, where: str) -> Iterator[memoryview]:
    """The bytes of a file as they arrive, each piece after its digest was checked. Raises BrokenCheckpoint."""
    file = found.files[name]
    chunks = sorted((chunk for chunk in found.chunks if chunk.file == name), key=lambda chunk: chunk.start)
    starts = [file.head, *(chunk.start for chunk in chunks), file.size]
    assert starts[1] == file.head or not chunks
    digests = [file.digest, *(chunk.digest for chunk in chunks)]
    sizes = [file.head, *(after - start for start, after in itertools.pairwise(starts[1:]))]
    rest = bytearray()
    for size, expected in zip(sizes, digests, strict=True):
        while len(rest) < size and (more := next(arriving, b"")):
            rest += more
        piece, rest = memoryview(bytes(rest[:size])), rest[size:]
        if manifest.digest(piece) != expected:
            raise BrokenCheckpoint(f"{where} is not as it was written")
        yield piece
    if rest or next(arriving, b""):
        raise BrokenCheckpoint(f"{where} is longer than it was written")


def download(url: str, run_dir: Path) -> Path:
    """Bring a checkpoint back into a run's folder: the one that a URL names, or the newest of a mirror."""
    store = Store(url)
    if (pointer := store.small(folders.POINTER_BYTES, folders.POINTER)) is not None:
        name = pointer.decode("ascii", "replace").partition(" ")[0]
        store = Store(f"{store.url}/{name}")
    name = store.url.rpartition("/")[2]
    stored = store.small(manifest.GREATEST, FILE)
    if stored is None:
        raise BrokenCheckpoint(
            f"{store.url} holds neither {folders.POINTER} nor {FILE}: it is no mirror, or incomplete"
        )
    found = manifest.of_bytes(stored, Path(FILE))
    if name != manifest.name_of(found.meta.step):
        raise BrokenCheckpoint(f"{store.url} holds step {found.meta.step}: it was renamed")
    target = run_dir / "checkpoints" / name
    if target.exists():
        raise FileExistsError(f"{target} is there already")
    with appearing(target) as aside:
        for file in found.files:
            with (aside / file).open("wb") as into:
                for piece in verified(store.get(file), found, file, f"{store.url}/{file}"):
                    into.write(piece)
                into.flush()
                os.fsync(into.fileno())
        write_bytes(aside / FILE, stored)
    if (newest := folders.newest(run_dir)) is not None:
        folders.point_at(newest.folder)
    return target
