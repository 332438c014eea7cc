"""Random access to the tokens of documents, in a local folder or at a URL.

A local folder without compression is read in place. Shards that are remote or compressed are fetched into the cache and
decompressed there, either at first use or in advance by `DocumentStore.prepare`. A shard's digest is verified once per
file, before tokens from the file are returned.

A fault raises DataError, or FolderError while a folder is opened. Every fault is raised: no fault looks like the end of
the data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
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
from hybridtron.storage.cache import CacheEntry, CacheOptions
from hybridtron.storage.fetch import Wanted, fetch_file
from hybridtron.storage.remote import inside, remote_of
from hybridtron.storage.retry import Damaged, StorageError

MAPPED = 64  # maximum number of shards that a store keeps memory-mapped
THREADS = 4  # number of shards that `prepare` fetches at the same time


class DataError(StorageError):
    """Raised when reading fails. The message names the folder, the shard and, for a faulty sample, the sample."""


class _Mapped(NamedTuple):
    """A memory-mapped shard.

    offsets: byte offsets at which the samples begin, and at which the shard ends
    lengths: how many tokens each document has
    first_document: index of the shard's first document in the source
    inode: inode of `file` when it was mapped; if it differs later, the cache has evicted or replaced the file
    """

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
        self._remote = None  # store from which shards are fetched; None if they are read in place
        if folder.remote is not None or manifest.compression is not None:
            check_limit(folder, cache)
            self._remote = remote_of(place, cache.patience, retried=folder.remote is not None)
        self._packed = folder.packed_digests(split, source)
        self.lengths = folder.lengths(split, source)
        self.shard_documents = np.array([shard.documents for shard in self._shards], dtype=np.int64)
        self.shard_bytes = [shard.size for shard in self._shards]
        self.shard_tokens = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = list(accumulate(shard.documents for shard in self._shards))
        self._dtype = np.dtype(manifest.dtype)
        self._itemsize = self._dtype.itemsize
        self.vocab_size = manifest.vocab_size
        self.masked = any(shard.learned is not None for shard in self._shards)
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()

    def shard_of(self, document: int) -> int:
        """Return the index of the shard that holds a document; raise IndexError if there is no such document."""
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"{self._name} has {len(self.lengths)} documents; there is no document {document}")
        return bisect_right(self._ends, document)

    def read(self, document: int, first: int, count: int) -> np.ndarray:
        """Return `count` tokens of a document, starting at its token `first`, as a view into the mapped shard.

        A caller that keeps the tokens must copy them. Tokens are not compared with the vocabulary size here. Callers
        compare the tokens in many spans at once, and then call `check` to find the faulty span.
        """
        mapped, end, remaining = self._place(document, first, count)
        return np.frombuffer(mapped.data, self._dtype, count, end - remaining * self._itemsize)

    def read_mask(self, document: int, first: int, count: int) -> np.ndarray:
        """Return a boolean for each token in a span: whether the token counts in the loss as a label.

        For a shard without masks, every boolean is True.
        """
        if self._shards[bisect_right(self._ends, document)].learned is None:
            return np.ones(count, np.bool_)
        mapped, end, remaining = self._place(document, first, count)
        start = mask_start(end, first + remaining, self._itemsize) + first
        return np.frombuffer(mapped.data, np.uint8, count, start) != 0

    def _place(self, document: int, first: int, count: int) -> tuple[_Mapped, int, int]:
        """Find a document; raise IndexError if it has fewer than `first + count` tokens.

        Returns the mapped shard, the byte offset at which the sample ends, and the number of tokens from `first` to the
        document's end.
        """
        shard = bisect_right(self._ends, document)
        try:
            mapped = self._mapped[shard]
            self._mapped.move_to_end(shard)  # raises KeyError if another thread has just unmapped the shard
        except KeyError:
            mapped = self._map(shard, document)
        sample = document - mapped.first_document
        remaining = mapped.lengths.item(sample) - first
        if not (0 <= count <= remaining and first >= 0 and sample >= 0):
            raise IndexError(
                f"{self._name}: tokens {first} to {first + count} of document {document} can't be read, because it has "
                f"{remaining + first} tokens"
            )
        return mapped, mapped.offsets.item(sample + 1), remaining

    def check(self, document: int, first: int, count: int) -> None:
        """Raise DataError if a span has a token id beyond the vocabulary. The message names shard and sample."""
        largest = self.read(document, first, count).max(initial=0)
        if largest >= self.vocab_size:
            shard = self.shard_of(document)
            sample = document - self._ends[shard] + self._shards[shard].documents
            raise DataError(
                f"{self._shard_name(shard)}: document {document} (sample {sample} of the shard) has the token "
                f"{largest}, but the vocabulary has {self.vocab_size} entries"
            )

    @property
    def fetches(self) -> bool:
        """True if shards are read through the cache. Fetching several in parallel with `prepare` then saves time."""
        return self._remote is not None

    def missing(self) -> dict[int, int]:
        """Return shard -> missing bytes, for shards that are not in the cache or have a wrong size there."""
        lacking = {}
        for number, shard in enumerate(self._shards):
            path = self._entry.root / f"{self._where}/{shard.file}"
            size = path.stat().st_size if path.is_file() else 0
            if size != shard.size:
                lacking[number] = shard.size - size
        return lacking

    def prepare(self, shards: Iterable[int], ready: Callable[[int], None] = lambda shard: None) -> None:
        """Fetch these shards into the cache, several in parallel, and verify them; raise DataError if one fails.

        `ready` is called with each shard that was fetched and verified, in the order of `shards`.
        """
        missing = [shard for shard in dict.fromkeys(shards) if shard not in self._mapped]
        if not missing:
            return
        pool = ThreadPoolExecutor(THREADS, "prepare")
        try:
            for shard, acquired in [(shard, pool.submit(self._acquire, shard)) for shard in missing]:
                acquired.result()
                ready(shard)
        finally:
            pool.shutdown(cancel_futures=True)

    @property
    def _name(self) -> str:
        return f"{self.folder.name} ({self._where})"

    def _shard_name(self, shard: int) -> str:
        return f"{self.folder.name}: shard {self._where}/{self._shards[shard].file}"

    def _map(self, shard: int, document: int) -> _Mapped:
        """Map a document's shard into memory, and check its header against manifest.json and lengths.npy."""
        self.shard_of(document)
        try:
            path, data = self._acquire(shard)
        except DataError as error:
            raise DataError(f"{error} (requested for document {document})") from error
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
                f"{self._shard_name(shard)}: the sizes of {len(missized)} samples do not fit lengths.npy; the first is "
                f"sample {missized[0]} (document {end - documents + int(missized[0])})"
            )
        mapped = _Mapped(data, offsets, lengths, end - documents, path, _inode(path))
        self._drop_maps()
        self._mapped[shard] = mapped
        return mapped

    def _acquire(self, shard: int) -> tuple[Path, mmap]:
        """Return a shard's path and its bytes, after fetching it if necessary and verifying its digest."""
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
                    check = f"run `hybridtron data verify {self.folder.path}` to verify every shard"
                    raise DataError(f"{what}; {check}") from fault
            manifest = self.folder.manifest
            stored = f"{self._where}/{manifest.stored_name(of_shard)}"
            size = of_shard.size + (of_shard.packed or 0)
            unpack = None
            if (kind := manifest.compression) is not None:
                unpack = partial(unpacked_shard, kind, of_shard, self._packed[shard])
            return path, fetch_file(self._entry, self._remote, Wanted(key, stored, size, opened, unpack))
        except (StorageError, OSError) as error:
            raise DataError(f"{self._shard_name(shard)} {error}") from error

    def _drop_maps(self) -> None:
        """Unmap every shard that the cache has evicted, and the least recently used shards until another shard fits.

        The disk space of an evicted file is freed only when the file is unmapped.
        """
        for shard, mapped in list(self._mapped.items()):
            if len(self._mapped) >= MAPPED or (self._remote is not None and _inode(mapped.file) != mapped.inode):
                self._mapped.pop(shard, None)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None
