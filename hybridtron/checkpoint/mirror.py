"""Copies of finished checkpoints in an S3-compatible store, and fetching them.

    s3://BUCKET/PREFIX/step-00000100/...    a checkpoint; its manifest is uploaded last, without which it is none
    s3://BUCKET/PREFIX/latest               the name of the newest, and the digest of its manifest

What was uploaded is read back and compared with the manifest before the manifest follows. Uploading happens in a thread
of the first process; while it is busy the newest checkpoint waits, and one that is overtaken is left out. A copy that
fails is reported, and tried again with the next checkpoint, which is why its requests are not repeated here. Nothing is
removed from the store: its own rules can do that.
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
    """Keeps a store up to date with the checkpoints of a run."""

    def __init__(self, url: str) -> None:
        self.bucket = Bucket(url, PATIENCE)
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self.busy: Path | None = None  # what is being read, which must not be removed
        self._thread: threading.Thread | None = None

    def offer(self, folder: Path) -> None:
        """Upload a checkpoint, now or as soon as the one before it has arrived."""
        with self._lock:
            if self._waiting is not None:
                print(f"{self.bucket.url}: {self._waiting.name} is left out for {folder.name}", file=sys.stderr)
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
                upload(self.bucket, self.busy)
            except Exception as error:  # whatever it is: the next checkpoint is tried, and training continues
                said = f"{type(error).__name__}: {error}"
                print(f"NOT MIRRORED: {self.busy} to {self.bucket.url}: {said}", file=sys.stderr)
            with self._lock:
                self.busy, self._waiting = self._waiting, None


def upload(bucket: Bucket, folder: Path) -> None:
    """Copy a checkpoint, read the copy back, and only then make it one. Raises BrokenCheckpoint where it differs, and
    StorageError where the bucket fails.
    """
    stored = manifest.stored_in(folder)
    found = manifest.of_bytes(stored, folder / FILE)
    if bucket.small(f"{folder.name}/{FILE}", manifest.GREATEST) != stored:
        for name in found.files:
            copy = f"{folder.name}/{name}"
            bucket.put_file(copy, folder / name)
            for _ in verified(bucket.pieces(copy), found, name, f"{bucket.url}/{copy}"):
                pass
        bucket.put(f"{folder.name}/{FILE}", stored)
        if bucket.small(f"{folder.name}/{FILE}", manifest.GREATEST) != stored:
            raise BrokenCheckpoint(f"{bucket.url}/{folder.name}/{FILE} is not as it was written")
    bucket.put(folders.POINTER, f"{folder.name} {digest_of(stored)}\n".encode())


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
        if digest_of(piece) != expected:
            raise BrokenCheckpoint(f"{where} is not as it was written")
        yield piece
    if rest or next(arriving, b""):
        raise BrokenCheckpoint(f"{where} is longer than it was written")


def download(url: str, run_dir: Path) -> Path:
    """Bring a checkpoint back into a run's folder: the one that a URL names, or the newest of a mirror."""
    bucket = Bucket(url, PATIENCE)
    if (pointer := bucket.small(folders.POINTER, folders.POINTER_BYTES)) is not None:
        name = pointer.decode("ascii", "replace").partition(" ")[0]
        bucket = Bucket(f"{bucket.url}/{name}", PATIENCE)
    name = bucket.url.rpartition("/")[2]
    stored = bucket.small(FILE, manifest.GREATEST)
    if stored is None:
        raise BrokenCheckpoint(
            f"{bucket.url} holds neither {folders.POINTER} nor {FILE}: it is no mirror, or incomplete"
        )
    found = manifest.of_bytes(stored, Path(FILE))
    if name != manifest.name_of(found.meta.step):
        raise BrokenCheckpoint(f"{bucket.url} holds step {found.meta.step}: it was renamed")
    target = run_dir / "checkpoints" / name
    if target.exists():
        raise FileExistsError(f"{target} is there already")
    with appearing(target) as temporary:
        for file in found.files:
            with (temporary / file).open("wb") as into:
                for piece in verified(bucket.pieces(file), found, file, f"{bucket.url}/{file}"):
                    into.write(piece)
            sync(temporary / file)
        write_bytes(temporary / FILE, stored)
    if (newest := folders.newest(run_dir)) is not None:
        folders.point_at(newest.folder)
    return target
