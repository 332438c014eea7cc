"""Copies of finished checkpoints in an S3-compatible store: uploading and downloading them.

    s3://BUCKET/PREFIX/step-00000100/...    a checkpoint; its manifest is uploaded last, and makes it complete
    s3://BUCKET/PREFIX/latest               the name of the newest checkpoint, and the digest of its manifest

Every uploaded file is read back and compared with the manifest before the manifest is uploaded. The first process
uploads in a thread. While that is busy the newest checkpoint waits, and an older one that still waits is dropped. A
failed upload is reported, and the next checkpoint is tried; therefore single requests are not retried here. Nothing is
removed from the store: its own lifecycle rules can do that.
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
from hybridtron.storage.attempts import Patience
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import sync
from hybridtron.storage.s3 import Bucket

PATIENCE = Patience(timeout=300.0, retries=0, slowest=2**17)


class Mirror:
    """Background upload of a run's checkpoints to a store."""

    def __init__(self, url: str) -> None:
        self.bucket = Bucket(url, PATIENCE)
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self.busy: Path | None = None  # the checkpoint that is being uploaded and must not be removed
        self._thread: threading.Thread | None = None

    def offer(self, folder: Path) -> None:
        """Upload a checkpoint in the background, now or after the one that is being uploaded.

        It replaces a checkpoint that still waits, which is then not uploaded.
        """
        with self._lock:
            if self._waiting is not None:
                print(f"{self.bucket.url}: {self._waiting.name} is left out for {folder.name}", file=sys.stderr)
            self._waiting = folder
            if self.busy is None:
                self.busy = folder
                self._waiting = None
                self._thread = threading.Thread(target=self._work, args=(folder,), name="mirror", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until every upload has ended or failed."""
        if self._thread is not None:
            self._thread.join()

    def in_use(self) -> set[Path]:
        """Return the checkpoints that are being uploaded or wait for it. They must not be removed."""
        with self._lock:
            return {folder for folder in (self.busy, self._waiting) if folder is not None}

    def _work(self, folder: Path | None) -> None:
        """Upload a checkpoint, then the one that waits, until none waits. Runs in the mirror's thread.

        The thread is done when it sets `busy` to None, under the lock: from then on `offer` starts another thread.
        """
        while folder is not None:
            try:
                upload(self.bucket, folder)
            except Exception as error:  # any error: training must continue, and the next checkpoint is tried
                said = f"{type(error).__name__}: {error}"
                print(f"NOT MIRRORED: {folder} to {self.bucket.url}: {said}", file=sys.stderr)
            with self._lock:
                folder = self.busy = self._waiting
                self._waiting = None


def upload(bucket: Bucket, folder: Path) -> None:
    """Upload a checkpoint, read the copy back, then upload its manifest and update the pointer.

    A checkpoint whose manifest is in the store already is not uploaded again. Raises BrokenCheckpoint if the copy
    differs, and StorageError if the store fails.
    """
    stored = manifest.stored_in(folder)
    stored_manifest = manifest.of_bytes(stored, folder / FILE)
    if bucket.small(f"{folder.name}/{FILE}", manifest.GREATEST) != stored:
        for name in stored_manifest.files:
            copy = f"{folder.name}/{name}"
            bucket.put_file(copy, folder / name)
            for _ in verified(bucket.pieces(copy), stored_manifest, name, f"{bucket.url}/{copy}"):
                pass
        bucket.put(f"{folder.name}/{FILE}", stored)
        if bucket.small(f"{folder.name}/{FILE}", manifest.GREATEST) != stored:
            raise BrokenCheckpoint(f"{bucket.url}/{folder.name}/{FILE} is not as it was written")
    bucket.put(folders.POINTER, f"{folder.name} {digest_of(stored)}\n".encode())


def verified(arriving: Iterator[bytes], found: CheckpointManifest, name: str, where: str) -> Iterator[memoryview]:
    """Yield a file's head and chunks as they arrive, each after its digest was verified.

    Raises BrokenCheckpoint if a digest differs or the file is too long. `where` names the file in messages.
    """
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
        piece = memoryview(bytes(rest[:size]))
        rest = rest[size:]
        if digest_of(piece) != expected:
            raise BrokenCheckpoint(f"{where} is not as it was written")
        yield piece
    if rest or next(arriving, b""):
        raise BrokenCheckpoint(f"{where} is longer than it was written")


def download(url: str, run_dir: Path) -> Path:
    """Download a checkpoint into a run's folder, verify it and return its path.

    `url` names a checkpoint, or a mirror whose newest checkpoint is meant. Raises BrokenCheckpoint if it is damaged or
    incomplete, and FileExistsError if the run has this checkpoint already.
    """
    bucket = Bucket(url, PATIENCE)
    if (pointer := bucket.small(folders.POINTER, folders.POINTER_BYTES)) is not None:
        name = pointer.decode("ascii", "replace").partition(" ")[0]
        bucket = Bucket(f"{bucket.url}/{name}", PATIENCE)
    name = bucket.url.rpartition("/")[2]
    stored = bucket.small(FILE, manifest.GREATEST)
    if stored is None:
        raise BrokenCheckpoint(
            f"{bucket.url} holds neither {folders.POINTER} nor {FILE}: it is not a mirror, or incomplete"
        )
    stored_manifest = manifest.of_bytes(stored, Path(FILE))
    if name != manifest.name_of(stored_manifest.meta.step):
        raise BrokenCheckpoint(f"{bucket.url} holds step {stored_manifest.meta.step}: it was renamed")
    target = run_dir / "checkpoints" / name
    if target.exists():
        raise FileExistsError(f"{target} already exists")
    with appearing(target) as temporary:
        for file in stored_manifest.files:
            with (temporary / file).open("wb") as into:
                for piece in verified(bucket.pieces(file), stored_manifest, file, f"{bucket.url}/{file}"):
                    into.write(piece)
            sync(temporary / file)
        write_bytes(temporary / FILE, stored)
    if (newest := folders.newest(run_dir)) is not None:
        folders.point_at(newest.folder)
    return target
