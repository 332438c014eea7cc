"""Every byte of a prepared folder checked against its manifest: every fault is reported, not only the first.

Opening a folder looks at sizes, and reading looks at the shards that are read; this looks at all of it: indexes,
digests of shards as they are stored and as they are read, offsets, lengths, token ids, the eos of each document, sums,
and the tokenizer. It changes nothing. What the text says, or how well it was tokenized, it can't judge.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridtron.data.folder import (
    LARGEST_INDEX,
    LARGEST_MANIFEST,
    LARGEST_TOKENIZER,
    SPLITS,
    DataManifest,
    DataShard,
    FolderError,
    TokenFolder,
)
from hybridtron.data.mds.compression import unpacked
from hybridtron.data.mds.format import index_faults, packed_digests, read_offsets, wrong_samples
from hybridtron.regular_files import read_regular
from hybridtron.storage.attempts import StorageError
from hybridtron.storage.digest import digest_of
from hybridtron.storage.remote import inside

REPORTED = 20  # wrong samples of one shard that are reported one by one
MORE = 2**20  # bytes beyond its size that a file is still read with, and looked at


@dataclass(frozen=True)
class FolderReport:
    """What was looked at, and what was wrong with it: each fault begins with the name of its file."""

    sources: int
    shards: int
    tokens: int
    faults: list[str]


@dataclass(frozen=True)
class ShardTask:
    """One shard to look at. `packed_digest` is None where the index is not to be trusted, `lengths` likewise."""

    root: Path
    where: str
    shard: DataShard
    stored: str
    compression: str | None
    packed_digest: str | None
    lengths: np.ndarray | None
    dtype: str
    vocab_size: int
    eos: int


def verify(path: Path, workers: int = 1, watch: Callable[[int, int], None] = lambda done, whole: None) -> FolderReport:
    """Look at a folder, its shards by N processes; after each, `watch` is called with the number done and the whole."""
    try:
        text = read_regular(inside(path, "manifest.json"), LARGEST_MANIFEST).decode()
        folder = TokenFolder(path, DataManifest.parse(text, path), digest_of(text.encode()))
    except (FolderError, StorageError, OSError, UnicodeDecodeError) as error:
        return FolderReport(0, 0, 0, [f"manifest.json: {error}"])
    manifest = folder.manifest
    faults = [f"tokenizer.json: {fault}" for fault in tokenizer_faults(folder)]
    tasks: list[ShardTask] = []
    for split in SPLITS:
        for source in manifest.splits[split]:
            found, of_source = source_faults(folder, split, source)
            faults += found
            tasks += of_source
    faults += shard_faults(tasks, workers, watch)
    names = {source for split in SPLITS for source in manifest.splits[split]}
    return FolderReport(len(names), len(tasks), sum(task.shard.tokens for task in tasks), faults)


def tokenizer_faults(folder: TokenFolder) -> Iterator[str]:
    """The tokenizer against the manifest's digest and vocabulary."""
    from tokenizers import Tokenizer

    manifest = folder.manifest
    try:
        data = read_regular(inside(folder.path, "tokenizer.json"), LARGEST_TOKENIZER)
    except (StorageError, OSError) as error:
        yield str(error)
        return
    if digest_of(data) != manifest.tokenizer:
        yield "differs from its digest in the manifest"
    if not 0 <= manifest.eos < manifest.vocab_size:
        yield f"eos is token {manifest.eos} in the manifest, and the vocabulary has {manifest.vocab_size} entries"
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the type is Exception itself
        yield f"does not parse: {error}"
        return
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= manifest.vocab_size:
        yield f"has the token {largest}, and the manifest a vocabulary of {manifest.vocab_size} entries"


def source_faults(folder: TokenFolder, split: str, source: str) -> tuple[list[str], list[ShardTask]]:
    """What is wrong with a source's index and lengths, and its shards to look at."""
    manifest, where = folder.manifest, f"{split}/{source}"
    of_source = manifest.splits[split][source]
    faults: list[str] = []
    digests: list[str | None] = [None] * len(of_source.shards)
    try:
        index = read_regular(inside(folder.path, f"{where}/index.json"), LARGEST_INDEX)
        found = list(index_faults(index, manifest, of_source))
        if digest_of(index) != of_source.index:
            found.append("differs from its digest in the manifest")
        digests = digests if found else packed_digests(index)
        faults += [f"{where}/index.json: {fault}" for fault in found]
    except (StorageError, OSError) as error:
        faults.append(f"{where}/index.json: {error}")
    lengths = None
    try:
        inside(folder.path, f"{where}/lengths.npy")
        lengths = folder.lengths(split, source)
    except (FolderError, StorageError) as error:
        faults.append(f"{where}/lengths.npy: {error}")
    ends = np.cumsum([0, *(shard.documents for shard in of_source.shards)])
    tasks = [
        ShardTask(
            folder.path,
            where,
            shard,
            manifest.stored_name(shard),
            manifest.compression,
            digests[number],
            None if lengths is None else lengths[ends[number] : ends[number + 1]],
            manifest.dtype,
            manifest.vocab_size,
            manifest.eos,
        )
        for number, shard in enumerate(of_source.shards)
    ]
    return faults, tasks


def shard_faults(tasks: list[ShardTask], workers: int, watch: Callable[[int, int], None]) -> list[str]:
    """What is wrong with the shards, in their order."""
    found: dict[int, list[str]] = {}
    if workers <= 1 or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            found[number] = faults_of(task)
            watch(number + 1, len(tasks))
    else:
        with ProcessPoolExecutor(min(workers, len(tasks)), multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(faults_of, task): number for number, task in enumerate(tasks)}
            for done, future in enumerate(as_completed(futures)):
                number = futures[future]
                try:
                    found[number] = future.result()
                except BrokenProcessPool:
                    name = f"{tasks[number].where}/{tasks[number].stored}"
                    found[number] = [
                        f"{name}: not verified: a process ended, perhaps for lack of memory; use fewer --workers"
                    ]
                watch(done + 1, len(tasks))
    return [fault for number in range(len(tasks)) for fault in found[number]]


def faults_of(task: ShardTask) -> list[str]:
    """What is wrong with one shard."""
    stored = f"{task.where}/{task.stored}"
    try:
        expected = task.shard.size if task.shard.packed is None else task.shard.packed
        data = read_regular(inside(task.root, stored), expected + MORE)
    except FileNotFoundError:
        return [f"{stored}: is missing"]
    except (StorageError, OSError) as error:
        return [f"{stored}: {error}"]
    return [f"{stored}: {fault}" for fault in _content_faults(task, data)]


def _content_faults(task: ShardTask, data: bytes) -> Iterator[str]:
    if task.compression is not None:
        if len(data) != task.shard.packed:
            yield f"has {len(data)} of {task.shard.packed} bytes"
        elif task.packed_digest is not None and digest_of(data) != task.packed_digest:
            yield "differs from its digest in the index"
        try:
            data = unpacked(task.compression, data, task.shard.size)
        except (ValueError, ImportError) as error:
            yield str(error)
            return
    if len(data) != task.shard.size:
        yield f"has {len(data)} of {task.shard.size} bytes" + (" when decompressed" if task.compression else "")
    elif digest_of(data) != task.shard.digest:
        yield "differs from its digest in the manifest" + (" when decompressed" if task.compression else "")
    try:
        offsets = read_offsets(data, task.shard)
    except ValueError as error:
        yield str(error)
        return
    if task.lengths is not None:
        yield from _sample_faults(task, data, offsets, np.asarray(task.lengths))


def _sample_faults(task: ShardTask, data: bytes, offsets: np.ndarray, lengths: np.ndarray) -> Iterator[str]:
    """Sizes, sums and tokens of the samples; the first few of each shard are named."""
    if (total := int(lengths.sum(dtype=np.int64))) != task.shard.tokens:
        yield f"has {total} tokens by lengths.npy, and {task.shard.tokens} by the manifest"
    dtype = np.dtype(task.dtype)
    wrong = set(wrong_samples(offsets, lengths, dtype.itemsize, len(data)).tolist())
    found = 0
    for sample, (end, length) in enumerate(zip(offsets[1:].tolist(), lengths.tolist(), strict=True)):
        fault = f"does not have the size of {length} tokens, its length in lengths.npy"
        if sample not in wrong:
            tokens = np.frombuffer(data, dtype, length, end - length * dtype.itemsize)
            fault = _token_fault(tokens, task)
        found += bool(fault)
        if fault and found <= REPORTED:
            yield f"sample {sample} {fault}"
    if found > REPORTED:
        yield f"{found - REPORTED} more samples are wrong"


def _token_fault(tokens: np.ndarray, task: ShardTask) -> str:
    if (largest := int(tokens.max())) >= task.vocab_size:
        return f"has the token {largest}, and the vocabulary {task.vocab_size} entries"
    if (last := int(tokens[-1])) != task.eos:
        return f"ends in token {last}, not in eos, {task.eos}"
    return ""
