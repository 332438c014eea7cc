"""Writes documents of tokens as a prepared folder, in parts that can be written in parallel.

Each part has its own shards in every split and source. Records describe the shards in a finished part. `assemble`
completes the folder: it writes index.json, lengths.npy and manifest.json from all parts' records, and leaves the shards
where they are.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridtron.data.folder import TokenFolder
from hybridtron.data.manifest import DIGEST, FORMAT, SPLITS, DataManifest, DataShard, SourceSplit
from hybridtron.data.mds.writer import ShardWriter, index_text
from hybridtron.storage.digest import digest_of

SHARD_SIZE = 2**26  # default maximum size of an uncompressed shard, in bytes


class PartRecord(NamedTuple):
    """Contents of a part in one source and split.

    entries: the shards' entries for index.json
    lengths: how many tokens each document has
    learned: how many tokens in each document count in the loss; None if there are no loss masks
    """

    entries: list[dict[str, Any]]
    lengths: np.ndarray
    learned: np.ndarray | None = None


Records = dict[str, PartRecord]  # the key is SPLIT/SOURCE, such as `train/web`


def token_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned dtype that can hold every token id."""
    if vocab_size <= 2**16:
        return "uint16"
    return "uint32"


class PartWriter:
    """Writer for the documents of one part.

    folder: the prepared folder
    part: the part's name
    masked: whether `write` gets a loss mask for each document
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        vocab_size: int,
        shard_size: int = SHARD_SIZE,
        compression: str | None = None,
        masked: bool = False,
    ) -> None:
        self.folder = folder
        self.part = part
        self.masked = masked
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)
        self.shard_size = shard_size
        self.compression = compression
        self._writers: dict[str, ShardWriter] = {}

    def write(self, where: str, tokens: Sequence[int] | np.ndarray, mask: np.ndarray | None = None) -> None:
        """Add a document; raise ValueError if a token is outside the vocabulary.

        where: split and source, such as `train/web`
        tokens: the document's tokens, with eos at the end
        mask: 1 for each token that counts in the loss, else 0
        """
        if where not in self._writers:
            self._writers[where] = ShardWriter(
                self.folder / where, self.dtype, self.shard_size, self.compression, f"{self.part}/", self.masked
            )
        writer = self._writers[where]
        wide = np.asarray(tokens, dtype=np.int64)
        if wide.min() < 0 or wide.max() >= self.vocab_size:
            document = f"document {len(writer.lengths)} of {where} in {self.part}"
            raise ValueError(f"{document} has a token outside the vocabulary (0 to {self.vocab_size - 1})")
        writer.write(wide.astype(self.dtype), mask)

    def finish(self) -> Records:
        """Write the unfinished shards; return a record for each split and source with documents."""
        for writer in self._writers.values():
            writer.finish()
        return {
            where: PartRecord(
                writer.entries,
                np.array(writer.lengths, dtype=np.uint32),
                None if writer.learned is None else np.array(writer.learned, dtype=np.uint32),
            )
            for where, writer in self._writers.items()
        }


def assemble(
    folder: Path,
    records: Iterable[Records],
    tokenizer: str,
    vocab_size: int,
    eos: int,
    compression: str | None,
    origin: Mapping[str, str | int | float],
) -> None:
    """Write tokenizer.json, index.json, lengths.npy and manifest.json of a folder whose shards are all written.

    records: each part's records, in the parts' order
    tokenizer: contents of tokenizer.json
    """
    gathered: dict[str, list[PartRecord]] = {}
    for where, record in itertools.chain.from_iterable(of_part.items() for of_part in records):
        gathered.setdefault(where, []).append(record)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    splits: dict[str, dict[str, SourceSplit]] = {split: {} for split in SPLITS}
    for where, parts in sorted(gathered.items()):
        split, source = where.split("/")
        splits[split][source] = _write_source(folder / where, parts)
    manifest = DataManifest(
        FORMAT,
        vocab_size,
        eos,
        token_dtype(vocab_size),
        compression,
        digest_of(tokenizer.encode()),
        splits,
        dict(origin),
    )
    (folder / "manifest.json").write_text(manifest.dumps(), encoding="utf-8")


def write_folder(
    path: Path,
    splits: Mapping[str, Mapping[str, Iterable[Sequence[int] | np.ndarray]]],
    tokenizer: str,
    vocab_size: int,
    eos: int,
    origin: Mapping[str, str | int | float],
    shard_size: int = SHARD_SIZE,
    compression: str | None = None,
    masks: Mapping[str, Mapping[str, Iterable[np.ndarray]]] | None = None,
) -> TokenFolder:
    """Write documents as a prepared folder. A folder that another process has created meanwhile is kept.

    splits: split -> source -> documents without eos, which is appended here
    masks: split -> source -> masks with an entry for each token and for eos

    Raises ValueError if a mask is missing, or has another length.
    """
    with beside(path) as temporary:
        temporary.mkdir(parents=True)
        part = PartWriter(temporary, "part-00000", vocab_size, shard_size, compression, masks is not None)
        for split, sources in splits.items():
            for source, documents in sources.items():
                where = f"{split}/{source}"
                pairs = _with_masks(where, documents, None if masks is None else masks[split][source])
                for document, mask in pairs:
                    part.write(where, np.append(np.asarray(document, dtype=np.int64), eos), mask)
        assemble(temporary, [part.finish()], tokenizer, vocab_size, eos, compression, origin)
        install(temporary, path)
    return TokenFolder.open(path)


def _with_masks(
    where: str, documents: Iterable[Sequence[int] | np.ndarray], masks: Iterable[np.ndarray] | None
) -> Iterator[tuple[Sequence[int] | np.ndarray, np.ndarray | None]]:
    """Yield each document with its mask; raise ValueError if their numbers differ, or if a mask does not fit."""
    if masks is None:
        yield from ((document, None) for document in documents)
        return
    for number, (document, mask) in enumerate(itertools.zip_longest(documents, masks)):
        if document is None or mask is None:
            raise ValueError(f"{where}: the numbers of documents and masks differ; one of them is {number}")
        if len(mask) != len(document) + 1:
            wanted = f"its {len(document)} tokens and eos"
            raise ValueError(
                f"{where}: the mask of document {number} has {len(mask)} entries, but needs one for each of {wanted}"
            )
        yield document, mask


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` that no other process uses; remove it at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def install(temporary: Path, path: Path) -> None:
    """Rename a finished folder to its final name, unless another process has created a folder with that name."""
    try:
        temporary.rename(path)
    except OSError:
        if not path.is_dir():
            raise


def _write_source(folder: Path, parts: Sequence[PartRecord]) -> SourceSplit:
    entries = [entry for part in parts for entry in part.entries]
    lengths = np.concatenate([part.lengths for part in parts])
    index = index_text(entries)
    (folder / "index.json").write_bytes(index)
    np.save(folder / "lengths.npy", lengths)
    ends = np.cumsum([entry["samples"] for entry in entries])
    tokens = [int(of_shard.sum(dtype=np.int64)) for of_shard in np.split(lengths, ends[:-1])]
    learned: list[int | None] = [None] * len(tokens)
    if counted := [part.learned for part in parts if part.learned is not None]:
        learned = [int(of_shard.sum(dtype=np.int64)) for of_shard in np.split(np.concatenate(counted), ends[:-1])]
    shards = tuple(map(_shard, entries, tokens, learned))
    return SourceSplit(digest_of(index), digest_of((folder / "lengths.npy").read_bytes()), shards)


def _shard(entry: dict[str, Any], tokens: int, learned: int | None) -> DataShard:
    raw = entry["raw_data"]
    packed = entry["zip_data"]
    return DataShard(
        file=raw["basename"],
        documents=entry["samples"],
        tokens=tokens,
        size=raw["bytes"],
        digest=raw["hashes"][DIGEST],
        packed=packed["bytes"] if packed else None,
        learned=learned,
    )
