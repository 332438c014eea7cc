"""Random access to documents: any span of any document, from a local folder, or from a URL through the cache.

A local folder without compression is read in place. Other shards are fetched into the cache at first use
(`storage/fetch.py`), or in advance by `prepare`. A shard's digest is verified before a token from it is returned, once
per file (`storage/cache.py`). Other modules decide which process reads which documents, and in which order.

A fault raises DataError, or FolderError while a folder is opened. It never looks like the end of the data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybridtron.data.folder import TokenFolder
from hybridtron.data.mds.compression import unpacked_shard
from hybridtron.data.mds.format import mask_start, read_offsets, wrong_samples
from hybridtron.data.mds.opening import check_limit
from hybridtron.storage.attempts import Damaged, StorageError
from hybridtron.storage.cache import CacheEntry, CacheOptions
from hybridtron.storage.fetch import Wanted, fetched
from hybridtron.storage.remote import inside, remote_of

MAPPED = 64  # shards that a store keeps mapped
THREADS = 4  # shards that `prepare` fetches at a time


class DataError(StorageError):
    """Raised when reading fails. The message names the dataset, the shard and, if one is concerned, the sample."""


class _Mapped(NamedTuple):
    """An open shard: its bytes, where its samples begin and end, and the lengths of its documents."""

    data: mmap
    offsets: np.ndarray
    lengths: np.ndarray
    first_document: int
    file: Path
    inode: int | None


class DocumentStore:
    """Reader for the documents in one split of a source."""

    def __init__(self, folder: TokenFolder, split: str, source: str, cache: CacheOptions) -> None:
        manifest = folder.manifest
        self.folder = folder
        self.split = split
        self.source = source
        self._shards = manifest.splits[split][source].shards
        self._where = f"{split}/{source}"
        place = folder.remote or str(folder.path.resolve())
        self._entry = CacheEntry(cache, place)
        self._remote = None  # the place that shards are fetched from; None if they are read in place
        if folder.remote is not None or manifest.compression is not None:
            check_limit(folder, cache)
            self._remote = remote_of(place, cache.patience)
        self._packed = folder.packed_digests(split, source)
        self.lengths = folder.lengths(split, source)
        self.shard_documents = np.array([shard.documents for shard in self._shards], dtype=np.int64)
        self.shard_tokens = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = list(accumulate(shard.documents for shard in self._shards))
        self._dtype = np.dtype(manifest.dtype)
        self._itemsize = self._dtype.itemsize
        self.vocab_size = manifest.vocab_size
        self.masked = any(shard.learned is not None for shard in self._shards)
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()

    def shard_of(self, document: int) -> int:
        """Return the shard that holds a document; raise IndexError if there is no such document."""
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"{self._name} has {len(self.lengths)} documents; there is no {document}")
        return bisect_right(self._ends, document)

    def read(self, document: int, first: int, count: int) -> np.ndarray:
        """Return `count` tokens of a document from its token `first`, as a view into the shard. Copy it to keep it.

        Tokens are not compared with the vocabulary here: callers do that for many spans at once, and `check` for one
        span.
        """
        mapped, end, left = self._place(document, first, count)
        return np.frombuffer(mapped.data, self._dtype, count, end - left * self._itemsize)

    def read_mask(self, document: int, first: int, count: int) -> np.ndarray:
        """Return True for each token in a span that is learned, as a label.

        Without masks in the shard, all are learned.
        """
        if self._shards[bisect_right(self._ends, document)].learned is None:
            return np.ones(count, np.bool_)
        mapped, end, left = self._place(document, first, count)
        start = mask_start(end, first + left, self._itemsize) + first
        return np.frombuffer(mapped.data, np.uint8, count, start) != 0

    def _place(self, document: int, first: int, count: int) -> tuple[_Mapped, int, int]:
        """Find a document: return its open shard, its sample's end there, and its number of tokens from `first`."""
        shard = bisect_right(self._ends, document)
        try:
            mapped = self._mapped[shard]
            self._mapped.move_to_end(shard)  # KeyError too, if another thread has dropped it by now
        except KeyError:
            mapped = self._map(shard, document)
        sample = document - mapped.first_document
        left = mapped.lengths.item(sample) - first
        if not (0 <= count <= left and first >= 0 and sample >= 0):
            raise IndexError(
                f"{self._name}: document {document} has {left + first} tokens; {first}..{first + count} are not there"
            )
        return mapped, mapped.offsets.item(sample + 1), left

    def check(self, document: int, first: int, count: int) -> None:
        """Raise DataError, with the names of shard and sample, if a span has a token beyond the vocabulary."""
        largest = self.read(document, first, count).max(initial=0)
        if largest >= self.vocab_size:
            shard = self.shard_of(document)
            sample = document - self._ends[shard] + self._shards[shard].documents
            raise DataError(
                f"{self._shard_name(shard)}: document {document} (sample {sample} of the shard) has the token "
                f"{largest}, and the vocabulary {self.vocab_size} entries"
            )

    @property
    def fetches(self) -> bool:
        """True if shards are not read in place, so that requesting several in parallel saves time."""
        return self._remote is not None

    def prepare(self, shards: Iterable[int]) -> None:
        """Make shards present and verified. Missing shards are fetched in parallel."""
        missing = [shard for shard in dict.fromkeys(shards) if shard not in self._mapped]
        if not missing:
            return
        pool = ThreadPoolExecutor(THREADS, "prepare")
        try:
            for done in [pool.submit(self._acquire, shard) for shard in missing]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    @property
    def _name(self) -> str:
        return f"{self.folder.name} ({self._where})"

    def _shard_name(self, shard: int) -> str:
        return f"{self.folder.name}: shard {self._where}/{self._shards[shard].file}"

    def _map(self, shard: int, document: int) -> _Mapped:
        """Open a shard for reading. Closes shards that are too many, or no longer in the cache."""
        self.shard_of(document)
        try:
            path, data = self._acquire(shard)
        except DataError as error:
            raise DataError(f"{error} (wanted for document {document})") from error
        end = self._ends[shard]
        documents = self._shards[shard].documents
        lengths = np.asarray(self.lengths[end - documents : end])
        try:
            offsets = read_offsets(data, self._shards[shard])
        except ValueError as error:
            raise DataError(f"{self._shard_name(shard)} {error}") from error
        masked = self._shards[shard].learned is not None
        if len(missized := wrong_samples(offsets, lengths, self._itemsize, len(data), masked)):
            raise DataError(
                f"{self._shard_name(shard)}: {len(missized)} samples do not have the size of their documents in "
                f"lengths.npy, the first is {missized[0]} (document {end - documents + int(missized[0])})"
            )
        mapped = _Mapped(data, offsets, lengths, end - documents, path, _inode(path))
        self._drop_maps()
        self._mapped[shard] = mapped
        return mapped

    def _acquire(self, shard: int) -> tuple[Path, mmap]:
        """Return a shard's path and its verified bytes. The shard is fetched if necessary."""
        of_shard = self._shards[shard]
        key = f"{self._where}/{of_shard.file}"
        opened = partial(self._entry.open, key=key, size=of_shard.size, digest=of_shard.digest)
        try:
            path = inside(self.folder.path if self._remote is None else self._entry.root, key)
            try:
                return path, opened(path)
            except (FileNotFoundError, NotADirectoryError, Damaged) as fault:
                if self._remote is None:
                    if isinstance(fault, Damaged):
                        what = fault
                    else:
                        what = "is missing"
                    check = f"`hybridtron data verify {self.folder.path}` verifies every shard"
                    raise DataError(f"{what}; {check}") from fault
            manifest = self.folder.manifest
            stored = f"{self._where}/{manifest.stored_name(of_shard)}"
            size = of_shard.size + (of_shard.packed or 0)
            unpack = None
            if (kind := manifest.compression) is not None:
                unpack = partial(unpacked_shard, kind, of_shard, self._packed[shard])
            return path, fetched(self._entry, self._remote, Wanted(key, stored, size, opened, unpack))
        except (StorageError, OSError) as error:
            raise DataError(f"{self._shard_name(shard)} {error}") from error

    def _drop_maps(self) -> None:
        """Unmap the oldest shards to make room for one more, and every evicted shard.

        An evicted file occupies the disk until it is unmapped.
        """
        for shard, mapped in list(self._mapped.items()):
            if len(self._mapped) >= MAPPED or (self._remote is not None and _inode(mapped.file) != mapped.inode):
                self._mapped.pop(shard, None)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None
