"""Full verification of a folder with prepared tokens, for `hybridtron data verify`.

Opening a folder checks only shard sizes, and training checks only the shards that it reads. Verification reads every
file, reports all faults, and changes nothing. It checks:

- the folder's tokenizer.json, and each source's index.json and lengths.npy
- each shard's digest, compressed and decompressed
- the samples' offsets and sizes
- each document's tokens: ids within the vocabulary, eos at the end, and mask entries 0 or 1
- the counts of tokens and learned tokens; a token is learned if it counts in the loss as a label
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.manifest import SPLITS, DataManifest, DataShard
from hybridtron.data.mds.compression import unpacked_shard
from hybridtron.data.mds.format import mask_start, read_offsets, wrong_samples
from hybridtron.data.workers import WorkerEnded, side_by_side
from hybridtron.safe_open import read_regular
from hybridtron.storage.digest import digest_of
from hybridtron.storage.remote import inside
from hybridtron.storage.retry import Damaged, StorageError

REPORTED = 20  # maximum number of faulty samples in a shard that are listed; further samples are only counted


@dataclass(frozen=True)
class FolderReport:
    """Counts of verified sources, shards and tokens, and all faults. Each fault begins with the faulty file's name."""

    sources: int
    shards: int
    tokens: int
    faults: list[str]


class ShardTask(NamedTuple):
    """One shard to verify.

    stored: path to the shard's file, relative to the prepared folder
    packed_digest: the compressed file's digest; None if the shard is stored uncompressed, or if index.json is faulty
    lengths: how many tokens each document in the shard has; None if lengths.npy is faulty
    manifest: the folder's manifest with an empty `splits`, so that a task is quickly sent to a worker process
    """

    stored: str
    shard: DataShard
    packed_digest: str | None
    lengths: np.ndarray | None
    manifest: DataManifest


def verify(path: Path, workers: int = 1, watch: Callable[[int, int], None] = lambda done, whole: None) -> FolderReport:
    """Verify a folder.

    workers: how many processes verify shards
    watch: function that is called after each shard, with the number of verified shards and the number of all shards
    """
    try:
        inside(path, "manifest.json")
        folder = TokenFolder.unchecked(path)
    except (FolderError, StorageError, OSError, UnicodeDecodeError) as error:
        return FolderReport(0, 0, 0, [f"manifest.json: {error}"])
    manifest = folder.manifest
    faults = [f"tokenizer.json: {fault}" for fault in tokenizer_faults(folder)]
    tasks: list[ShardTask] = []
    for split in SPLITS:
        for source in manifest.splits[split]:
            new_faults, new_tasks = source_faults(folder, split, source)
            faults += new_faults
            tasks += new_tasks
    faults += shard_faults(path, tasks, workers, watch)
    names = {source for split in SPLITS for source in manifest.splits[split]}
    return FolderReport(len(names), len(tasks), sum(task.shard.tokens for task in tasks), faults)


def tokenizer_faults(folder: TokenFolder) -> Iterator[str]:
    """Yield the faults in tokenizer.json: a wrong digest, a file that does not parse, or a too large token id."""
    from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer

    try:
        tokenizer = read_tokenizer(folder.verified("tokenizer.json"))
    except FolderError as error:
        yield error.fault
        return
    except BadTokenizer as error:
        yield f"does not parse: {error}"
        return
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= folder.manifest.vocab_size:
        yield f"has the token {largest}, but the manifest has a vocabulary of {folder.manifest.vocab_size} entries"


def source_faults(folder: TokenFolder, split: str, source: str) -> tuple[list[str], list[ShardTask]]:
    """Return the faults in a source's index.json and lengths.npy, and a task for each shard."""
    where = f"{split}/{source}"
    shards = folder.manifest.splits[split][source].shards
    faults: list[str] = []
    digests: list[str | None] = [None] * len(shards)
    lengths: list[np.ndarray | None] = [None] * len(shards)
    try:
        digests = folder.packed_digests(split, source)
    except FolderError as error:
        faults.append(f"{where}/index.json: {error.fault}")
    try:
        ends = np.cumsum([shard.documents for shard in shards], dtype=np.int64)
        lengths = [*np.split(folder.lengths(split, source), ends)[:-1]]
    except FolderError as error:
        faults.append(f"{where}/lengths.npy: {error.fault}")
    manifest = replace(folder.manifest, splits={})
    tasks = [
        ShardTask(f"{where}/{manifest.stored_name(shard)}", shard, digest, of_shard, manifest)
        for shard, digest, of_shard in zip(shards, digests, lengths, strict=True)
    ]
    return faults, tasks


def shard_faults(root: Path, tasks: list[ShardTask], workers: int, watch: Callable[[int, int], None]) -> list[str]:
    """Verify shards in parallel; return their faults, ordered by shard."""
    faults_by_shard: list[list[str]] = [[] for _ in tasks]
    done = 0
    try:
        for number, fault in side_by_side(partial(faults_of, root), tasks, workers):
            if fault is None:
                watch(done := done + 1, len(tasks))
            else:
                faults_by_shard[number].append(f"{tasks[number].stored}: {fault}")
    except WorkerEnded as error:
        faults_by_shard.append([f"shards: {len(tasks) - done} of {len(tasks)} were not verified: {error}"])
    return [fault for faults in faults_by_shard for fault in faults]


def faults_of(root: Path, task: ShardTask) -> Iterator[str]:
    """Yield the faults in one shard. Its samples are checked only if the shard's digest is right."""
    try:
        data = _content(inside(root, task.stored), task)
        offsets = read_offsets(data, task.shard)
    except FileNotFoundError:
        yield "is missing"
    except (Damaged, ImportError, OSError, StorageError, ValueError) as error:
        yield str(error)
    else:
        if task.lengths is not None:
            yield from _sample_faults(task, data, offsets, np.asarray(task.lengths))


def _content(file: Path, task: ShardTask) -> bytes:
    """Return a shard's decompressed bytes; raise Damaged if the shard's size or digest is wrong."""
    shard = task.shard
    compression = task.manifest.compression
    if compression is not None:
        data = unpacked_shard(compression, shard, task.packed_digest, file)
    elif len(data := read_regular(file, shard.size)) != shard.size:
        raise Damaged(f"has {len(data)} of {shard.size} bytes")
    if digest_of(data) != shard.digest:
        raise Damaged("differs from its digest in the manifest")
    return data


def _sample_faults(task: ShardTask, data: bytes, offsets: np.ndarray, lengths: np.ndarray) -> Iterator[str]:
    """Yield the faults in a shard's samples, and differences between its counts and the manifest's.

    Only the first REPORTED faulty samples are listed.
    """
    if (total := int(lengths.sum(dtype=np.int64))) != task.shard.tokens:
        yield f"has {total} tokens by lengths.npy, but {task.shard.tokens} by the manifest"
    dtype = np.dtype(task.manifest.dtype)
    masked = task.shard.learned is not None
    missized = set(wrong_samples(offsets, lengths, dtype.itemsize, len(data), masked).tolist())
    num_faulty = learned = 0
    for sample, (end, length) in enumerate(zip(offsets[1:].tolist(), lengths.tolist(), strict=True)):
        fault = f"does not have the size of {length} tokens, the document's length in lengths.npy"
        if sample not in missized:
            tokens = np.frombuffer(data, dtype, length, end - length * dtype.itemsize)
            fault = _token_fault(tokens, task.manifest)
            if masked:
                mask = np.frombuffer(data, np.uint8, length, mask_start(end, length, dtype.itemsize))
                learned += int(mask.sum())
                fault = fault or _mask_fault(mask)
        num_faulty += bool(fault)
        if fault and num_faulty <= REPORTED:
            yield f"sample {sample} {fault}"
    if num_faulty > REPORTED:
        yield f"{num_faulty - REPORTED} more samples are faulty"
    if masked and not num_faulty and learned != task.shard.learned:
        yield f"has {learned} learned tokens, but {task.shard.learned} by the manifest"


def _mask_fault(mask: np.ndarray) -> str:
    if (largest := int(mask.max())) > 1:
        return f"has a mask with the entry {largest}, not 0 or 1"
    return ""


def _token_fault(tokens: np.ndarray, manifest: DataManifest) -> str:
    if (largest := int(tokens.max())) >= manifest.vocab_size:
        return f"has the token {largest}, but the vocabulary has {manifest.vocab_size} entries"
    if (last := int(tokens[-1])) != manifest.eos:
        return f"ends with token {last}, not with the eos token {manifest.eos}"
    return ""
