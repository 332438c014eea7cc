"""The store of documents: any span of any document, from a folder on this machine, or from a URL through the cache.

A local folder without compression is read in place. Other shards are fetched into the cache when they are first used
(`fetch.py`), or ahead of that by `prepare`. Either way the digest of a shard's bytes is right before a token of it is
returned, and is computed once per file (`cache.py`). mosaicml-streaming brings the shards here; its StreamingDataset,
which shares memory between processes and owns an order of samples, has no part in it.

A fault ends in DataError, or FolderError while a dataset is opened; it never ends the data.
"""

from __future__ import annotations

import json
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

from hybridtron.data.folder import LARGEST_INDEX, SPLITS, DataManifest, FolderError, TokenFolder, digest_of, is_url
from hybridtron.data.store.cache import CacheOptions, Damaged, DataError, Entry, inside
from hybridtron.data.store.fetch import Fetcher, Streams, check_scheme, fetch_file
from hybridtron.data.store.mds import index_faults, packed_digests, read_offsets, wrong_samples
from hybridtron.regular_files import read_regular

__all__ = ["CacheOptions", "DataError", "Store", "open_folder"]

MAPPED = 64  # shards that a store keeps mapped
THREADS = 4  # shards that `prepare` fetches at a time
_SMALL = 2**20  # bytes that a manifest or a tokenizer may take before it gets more time than the timeout


class _Mapped(NamedTuple):
    """An open shard: its bytes, where its samples begin and end, and the lengths of its documents."""

    data: mmap
    offsets: np.ndarray
    lengths: np.ndarray
    first_document: int
    file: Path
    inode: int | None


def open_folder(path: str, cache: CacheOptions) -> TokenFolder:
    """A folder of prepared tokens by its path or its URL; FolderError if it can't be used."""
    if not is_url(path):
        folder = TokenFolder.open(Path(path))
    else:
        url = path.rstrip("/")
        check_scheme(url)
        folder = _fetch_folder(url, Entry(cache, url))
    _check_limit(folder, cache)
    return folder


class Store:
    """The documents of one source and split."""

    def __init__(self, folder: TokenFolder, split: str, source: str, cache: CacheOptions) -> None:
        manifest = folder.manifest
        self.folder, self.split, self.source = folder, split, source
        self._shards = manifest.splits[split][source].shards
        self._where = f"{split}/{source}"
        self._entry = Entry(cache, folder.remote or str(folder.path.resolve()))
        self._fetcher = None
        if folder.remote is not None or manifest.compression is not None:
            _check_limit(folder, cache)
            remote = folder.remote or str(folder.path.resolve())
            self._fetcher = Fetcher(self._entry, remote, manifest, self._where)
        for file in ("index.json", "lengths.npy"):
            inside(folder.path, f"{self._where}/{file}")
        self._packed = self._checked_index()
        self.lengths = folder.lengths(split, source)
        self.shard_documents = np.array([shard.documents for shard in self._shards], dtype=np.int64)
        self.shard_tokens = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = list(accumulate(shard.documents for shard in self._shards))
        self._dtype = np.dtype(manifest.dtype)
        self._itemsize = self._dtype.itemsize
        self.vocab_size = manifest.vocab_size
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_mapped": OrderedDict(), "lengths": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.lengths = self.folder.lengths(self.split, self.source)

    def shard_of(self, document: int) -> int:
        """The shard that holds a document."""
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"{self._name} has {len(self.lengths)} documents; there is no {document}")
        return bisect_right(self._ends, document)

    def read(self, document: int, first: int, count: int) -> np.ndarray:
        """`count` tokens of a document from its token `first` on: a view, to be copied by who keeps it.

        That they are tokens of the vocabulary is cheaper to see of many spans at once; `check` tells of one.
        """
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
        start = mapped.offsets.item(sample + 1) - left * self._itemsize
        return np.frombuffer(mapped.data, self._dtype, count, start)

    def check(self, document: int, first: int, count: int) -> None:
        """DataError, with the names of shard and sample, where a span has a token beyond the vocabulary."""
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
        """Whether shards come from elsewhere, and so are worth asking for side by side."""
        return self._fetcher is not None

    def prepare(self, shards: Iterable[int]) -> None:
        """Make shards present and verified; those that are missing are fetched side by side."""
        wanted = [shard for shard in dict.fromkeys(shards) if shard not in self._mapped]
        if not wanted:
            return
        pool = ThreadPoolExecutor(THREADS, "prepare")
        try:
            for done in [pool.submit(self._acquire, shard) for shard in wanted]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    @property
    def _name(self) -> str:
        return f"{self.folder.name} ({self._where})"

    def _shard_name(self, shard: int) -> str:
        return f"{self.folder.name}: shard {self._where}/{self._shards[shard].file}"

    def _checked_index(self) -> list[str | None]:
        """The digests of the compressed shards, from an index that agrees with the manifest."""
        of_source = self.folder.manifest.splits[self.split][self.source]
        try:
            index = read_regular(self.folder.source_path(self.split, self.source) / "index.json", LARGEST_INDEX)
        except OSError as error:
            raise DataError(f"{self.folder.name}: {self._where}/index.json can't be read: {error}") from error
        for fault in index_faults(index, self.folder.manifest, of_source):
            raise DataError(f"{self.folder.name}: {self._where}/index.json {fault}")
        if digest_of(index) != of_source.index:
            raise DataError(f"{self.folder.name}: {self._where}/index.json differs from its digest in the manifest")
        return packed_digests(index)

    def _map(self, shard: int, document: int) -> _Mapped:
        """Open a shard for reading, and drop those that are too many or no longer in the cache."""
        self.shard_of(document)
        try:
            path, data = self._acquire(shard)
        except DataError as error:
            raise DataError(f"{error} (wanted for document {document})") from error
        end, documents = self._ends[shard], self._shards[shard].documents
        lengths = np.asarray(self.lengths[end - documents : end])
        try:
            offsets = read_offsets(data, self._shards[shard])
        except ValueError as error:
            raise DataError(f"{self._shard_name(shard)} {error}") from error
        if len(wrong := wrong_samples(offsets, lengths, self._itemsize, len(data))):
            raise DataError(
                f"{self._shard_name(shard)}: {len(wrong)} samples do not have the size of their documents in "
                f"lengths.npy, the first is {wrong[0]} (document {end - documents + int(wrong[0])})"
            )
        mapped = _Mapped(data, offsets, lengths, end - documents, path, _inode(path))
        self._drop_maps()
        self._mapped[shard] = mapped
        return mapped

    def _acquire(self, shard: int) -> tuple[Path, mmap]:
        """A shard's file and its bytes, fetched if need be, and verified."""
        of_shard = self._shards[shard]
        key = f"{self._where}/{of_shard.file}"
        try:
            path = inside(self.folder.path if self._fetcher is None else self._entry.root, key)
            try:
                return path, self._entry.open(path, key, of_shard)
            except (FileNotFoundError, NotADirectoryError, Damaged) as fault:
                if self._fetcher is None:
                    told = fault if isinstance(fault, Damaged) else "is missing"
                    raise DataError(f"{told}; `hybridtron data verify {self.folder.path}` looks at all") from fault
            return path, self._fetcher.obtain(of_shard, self._packed[shard])
        except (DataError, OSError) as error:
            raise DataError(f"{self._shard_name(shard)} {error}") from error

    def _drop_maps(self) -> None:
        """Room for one more map. What was evicted takes its disk until it is unmapped, so it goes first."""
        for shard, mapped in list(self._mapped.items()):
            if len(self._mapped) >= MAPPED or (self._fetcher is not None and _inode(mapped.file) != mapped.inode):
                self._mapped.pop(shard, None)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def _check_limit(folder: TokenFolder, cache: CacheOptions) -> None:
    """FolderError if so little may be kept that shards would be evicted before they are read."""
    manifest = folder.manifest
    if cache.limit is None or (folder.remote is None and manifest.compression is None):
        return
    sources = [of_source for split in SPLITS for of_source in manifest.splits[split].values()]
    largest = max((shard.size + (shard.packed or 0) for one in sources for shard in one.shards), default=0)
    if cache.limit < 4 * largest:
        raise FolderError(
            folder.name,
            f"has shards that take up to {largest} bytes; data.cache_limit={cache.limit} holds fewer than 4 of them: "
            f"{4 * largest} or more works",
        )


def _fetch_folder(url: str, entry: Entry) -> TokenFolder:
    """Bring all but the shards of a remote folder into the cache: the manifest always, the rest where it differs."""
    streams = Streams(url, entry.options.timeout)

    def fetch(name: str, size: int, fault: Callable[[bytes], str | None], anew: bool = False) -> Path:
        try:
            return fetch_file(entry, streams, name, size, fault, anew)
        except DataError as error:
            raise FolderError(url, f"can't be opened: {name} {error}") from error

    text = fetch("manifest.json", _SMALL, _json_fault, anew=True).read_text(encoding="utf-8")
    manifest = DataManifest.parse(text, url)
    fetch("tokenizer.json", _SMALL, partial(_digest_fault, manifest.tokenizer))
    for split in SPLITS:
        for source, of_source in manifest.splits[split].items():
            fetch(f"{split}/{source}/index.json", _SMALL, partial(_digest_fault, of_source.index))
            lengths_size = 128 + 4 * of_source.documents
            fetch(f"{split}/{source}/lengths.npy", lengths_size, partial(_digest_fault, of_source.lengths))
    return TokenFolder(entry.root, manifest, digest_of(text.encode()), remote=url)


def _json_fault(data: bytes) -> str | None:
    try:
        json.loads(data)
    except ValueError as error:
        return f"is not JSON: {error}"
    return None


def _digest_fault(digest: str, data: bytes) -> str | None:
    return None if digest_of(data) == digest else "differs from its digest in the manifest"
