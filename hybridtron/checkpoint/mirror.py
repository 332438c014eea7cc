"""Copies of finished checkpoints in an S3-compatible store: upload and download.

    s3://BUCKET/PREFIX/step-00000100/...    a checkpoint; its manifest is uploaded last and completes the copy
    s3://BUCKET/PREFIX/latest               the name of the newest checkpoint, and its manifest's digest

Rank 0 uploads in a background thread, one checkpoint at a time. Each file is read back and verified before the manifest
is uploaded. A checkpoint that is finished during an upload waits. If a third checkpoint is finished meanwhile, it
replaces the waiting checkpoint, which is then never uploaded.

Failed requests and uploads are reported, but not repeated, since the next checkpoint will be uploaded anyway. Nothing
is removed from the store: use the store's lifecycle rules for that.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.files import appearing, write_bytes
from hybridtron.checkpoint.manifest import FILE, BrokenCheckpoint, CheckpointManifest
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import sync
from hybridtron.storage.retry import RetryPolicy
from hybridtron.storage.s3 import Bucket

PATIENCE = RetryPolicy(timeout=300.0, retries=0, slowest=2**17)


class Mirror:
    """Background upload of a run's checkpoints to a store."""

    def __init__(self, url: str) -> None:
        self.bucket = Bucket(url, PATIENCE)
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self.busy: Path | None = None  # the checkpoint that is being uploaded
        self._thread: threading.Thread | None = None

    def offer(self, folder: Path) -> None:
        """Upload a checkpoint in the background, now or after the checkpoint that is being uploaded.

        A checkpoint that waits already is replaced, and is not uploaded.
        """
        with self._lock:
            if self._waiting is not None:
                print(
                    f"{self.bucket.url}: {self._waiting.name} is not uploaded, because {folder.name} is finished",
                    file=sys.stderr,
                )
            self._waiting = folder
            if self.busy is None:
                self.busy = folder
                self._waiting = None
                self._thread = threading.Thread(target=self._work, args=(folder,), name="mirror", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until every upload has succeeded or failed."""
        if self._thread is not None:
            self._thread.join()

    def in_use(self) -> set[Path]:
        """Return the folders of the uploading and the waiting checkpoint, which must not be removed."""
        with self._lock:
            return {folder for folder in (self.busy, self._waiting) if folder is not None}

    def _work(self, folder: Path | None) -> None:
        """Upload a checkpoint, and then checkpoints that wait meanwhile. Runs in the background thread.

        The thread sets `busy` to None under the lock when no checkpoint waits, and ends. After that, `offer` starts a
        new thread.
        """
        while folder is not None:
            try:
                upload(self.bucket, folder)
            except Exception as error:  # any error: training must continue, and the next checkpoint is tried
                reason = f"{type(error).__name__}: {error}"
                print(f"NOT MIRRORED: {folder} to {self.bucket.url}: {reason}", file=sys.stderr)
            with self._lock:
                folder = self.busy = self._waiting
                self._waiting = None


def upload(bucket: Bucket, folder: Path) -> None:
    """Upload a checkpoint's files and verify the copies; then upload the manifest and the pointer (`latest`).

    If the store already has the checkpoint's manifest, only the pointer is uploaded. Raises BrokenCheckpoint if a copy
    differs from its file, and StorageError if the store fails.
    """
    stored = manifest.stored_in(folder)
    stored_manifest = manifest.of_bytes(stored, folder / FILE)
    if bucket.small(f"{folder.name}/{FILE}", manifest.MAX_MANIFEST_BYTES) != stored:
        for name in stored_manifest.files:
            copy = f"{folder.name}/{name}"
            bucket.put_file(copy, folder / name)
            for _ in verified(bucket.pieces(copy), stored_manifest, name, f"{bucket.url}/{copy}"):
                pass
        bucket.put(f"{folder.name}/{FILE}", stored)
        if bucket.small(f"{folder.name}/{FILE}", manifest.MAX_MANIFEST_BYTES) != stored:
            raise BrokenCheckpoint(f"{bucket.url}/{folder.name}/{FILE} differs from the uploaded manifest")
    bucket.put(folders.POINTER, f"{folder.name} {digest_of(stored)}\n".encode())


def verified(
    arriving: Iterator[bytes], checkpoint_manifest: CheckpointManifest, name: str, where: str
) -> Iterator[memoryview]:
    """Verify a file while it is read: yield its head and then each of its chunks, once their digests are verified.

    The head is the part before the first tensor. A chunk is the bytes in a tensor or tensor shard. `arriving` yields
    the file's bytes, in parts of any size. `where` names the file in messages. Raises BrokenCheckpoint if a digest
    differs or the file is too long.
    """
    file = checkpoint_manifest.files[name]
    chunks = sorted(
        (chunk for chunk in checkpoint_manifest.chunks if chunk.file == name), key=lambda chunk: chunk.start
    )
    starts = [file.head, *(chunk.start for chunk in chunks), file.size]
    assert starts[1] == file.head or not chunks
    digests = [file.digest, *(chunk.digest for chunk in chunks)]
    sizes = [file.head, *(end - start for start, end in itertools.pairwise(starts[1:]))]
    unread = bytearray()
    for size, expected in zip(sizes, digests, strict=True):
        while len(unread) < size and (more := next(arriving, b"")):
            unread += more
        part = memoryview(bytes(unread[:size]))
        unread = unread[size:]
        if digest_of(part) != expected:
            raise BrokenCheckpoint(f"{where} is damaged: its bytes differ from the digest in the manifest")
        yield part
    if unread or next(arriving, b""):
        raise BrokenCheckpoint(f"{where} is longer than its size in the manifest, {file.size:,} bytes")


def download(url: str, run_dir: Path) -> Path:
    """Download a checkpoint into a run's folder, verify it and return its path.

    `url` is the address of a checkpoint in a mirror, or of a mirror. From a mirror the newest checkpoint is downloaded.
    Raises BrokenCheckpoint if the checkpoint is damaged or incomplete, and FileExistsError if the run already has a
    checkpoint from that step.
    """
    bucket = Bucket(url, PATIENCE)
    if (pointer := bucket.small(folders.POINTER, folders.POINTER_BYTES)) is not None:
        name = pointer.decode("ascii", "replace").partition(" ")[0]
        bucket = Bucket(f"{bucket.url}/{name}", PATIENCE)
    name = bucket.url.rpartition("/")[2]
    stored = bucket.small(FILE, manifest.MAX_MANIFEST_BYTES)
    if stored is None:
        raise BrokenCheckpoint(
            f"{bucket.url} has neither a file {folders.POINTER} nor {FILE}: give the URL of a mirror or of a complete "
            "checkpoint in a mirror",
            code="no-file",
        )
    stored_manifest = manifest.of_bytes(stored, Path(FILE))
    if name != manifest.name_of(stored_manifest.meta.step):
        raise BrokenCheckpoint(
            f"{bucket.url} is a checkpoint of step {stored_manifest.meta.step}: it was renamed", code="changed"
        )
    target = run_dir / "checkpoints" / name
    if target.exists():
        raise FileExistsError(f"{target} already exists")
    with appearing(target) as temporary:
        for file in stored_manifest.files:
            with (temporary / file).open("wb") as into:
                for part in verified(bucket.pieces(file), stored_manifest, file, f"{bucket.url}/{file}"):
                    into.write(part)
            sync(temporary / file)
        write_bytes(temporary / FILE, stored)
    if (newest := folders.newest(run_dir)) is not None:
        folders.point_at(newest.folder)
    return target
