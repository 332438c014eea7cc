"""Tokens -> a folder of prepared tokens, in parts that can be written side by side.

A part is what one input file gives: its own shards in every split and source. A finished part is described by its
record; `assemble` makes the folder's indexes, lengths and manifest from the records, in their order. Shards stay
where they were written.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridtron.data.folder import DIGEST, FORMAT, SPLITS, DataManifest, DataShard, SourceSplit, TokenFolder
from hybridtron.data.mds.writer import ShardWriter, index_text
from hybridtron.storage.digest import digest_of

SHARD_SIZE = 2**26  # bytes


@dataclass
class PartRecord:
    """What a part holds of one source and split: MDS index entries of its shards, and its documents' lengths."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))


Records = dict[str, dict[str, PartRecord]]  # split -> source -> record


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds every token."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class PartWriter:
    """Writes the documents of one part below `folder`; `tokens` already end in eos."""

    def __init__(
        self, folder: Path, part: str, vocab_size: int, shard_size: int = SHARD_SIZE, compression: str | None = None
    ) -> None:
        self.folder, self.part = folder, part
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)
        self.shard_size, self.compression = shard_size, compression
        self._writers: dict[tuple[str, str], ShardWriter] = {}
        self._lengths: dict[tuple[str, str], list[int]] = {}

    def write(self, split: str, source: str, tokens: Sequence[int] | np.ndarray) -> None:
        """Add one document."""
        wide = np.asarray(tokens, dtype=np.int64)
        lengths = self._lengths.setdefault((split, source), [])
        if wide.min() < 0 or wide.max() >= self.vocab_size:
            raise ValueError(
                f"document {len(lengths)} of {split}/{source} in {self.part} has a token outside of "
                f"0..{self.vocab_size - 1}"
            )
        self._writer(split, source).write(wide.astype(self.dtype))
        lengths.append(len(wide))

    def finish(self) -> Records:
        """Write what is left; the record of each split and source that got a document."""
        records: Records = {}
        for (split, source), writer in self._writers.items():
            writer.finish()
            lengths = np.array(self._lengths[split, source], dtype=np.uint32)
            entries = [_renamed(entry, self.part) for entry in writer.entries]
            records.setdefault(split, {})[source] = PartRecord(entries, lengths)
        return records

    def _writer(self, split: str, source: str) -> ShardWriter:
        if (split, source) not in self._writers:
            out = self.folder / split / source / self.part
            shutil.rmtree(out, ignore_errors=True)  # of a part that was not finished
            self._writers[split, source] = ShardWriter(out, self.dtype, self.shard_size, self.compression)
        return self._writers[split, source]


def assemble(
    folder: Path,
    records: Iterable[Records],
    tokenizer: str,
    vocab_size: int,
    eos: int,
    compression: str | None,
    origin: Mapping[str, str | int | float],
) -> None:
    """Write tokenizer, indexes, lengths and manifest of a folder whose parts are all there."""
    gathered: dict[str, dict[str, list[PartRecord]]] = {split: {} for split in SPLITS}
    for record in records:
        for split, sources in record.items():
            for source, of_source in sources.items():
                gathered[split].setdefault(source, []).append(of_source)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    splits = {
        split: {source: _write_source(folder / split / source, parts) for source, parts in sorted(sources.items())}
        for split, sources in gathered.items()
    }
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
) -> TokenFolder:
    """Write documents by split and source, without their eos, which is added; a folder already there is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        part = PartWriter(temporary, "part-00000", vocab_size, shard_size, compression)
        for split, sources in splits.items():
            for source, documents in sources.items():
                for document in documents:
                    part.write(split, source, np.append(np.asarray(document, dtype=np.int64), eos))
        assemble(temporary, [part.finish()], tokenizer, vocab_size, eos, compression, origin)
        install(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TokenFolder.open(path)


def install(temporary: Path, path: Path) -> None:
    """Give a finished folder its name, unless another process has made one of that name by now."""
    try:
        temporary.rename(path)
    except OSError:
        if not path.is_dir():
            raise


def _renamed(entry: dict[str, Any], part: str) -> dict[str, Any]:
    """An index entry whose files are named from the source's folder."""
    files = {key: entry[key] for key in ("raw_data", "zip_data") if entry[key]}
    return entry | {key: info | {"basename": f"{part}/{info['basename']}"} for key, info in files.items()}


def _write_source(folder: Path, parts: Sequence[PartRecord]) -> SourceSplit:
    entries = [entry for part in parts for entry in part.entries]
    lengths = np.concatenate([part.lengths for part in parts])
    index = index_text(entries)
    (folder / "index.json").write_bytes(index)
    np.save(folder / "lengths.npy", lengths)
    ends = np.cumsum([entry["samples"] for entry in entries])
    tokens = [int(of_shard.sum(dtype=np.int64)) for of_shard in np.split(lengths, ends[:-1])]
    shards = tuple(_shard(entry, count) for entry, count in zip(entries, tokens, strict=True))
    return SourceSplit(digest_of(index), digest_of((folder / "lengths.npy").read_bytes()), shards)


def _shard(entry: dict[str, Any], tokens: int) -> DataShard:
    raw, packed = entry["raw_data"], entry["zip_data"]
    return DataShard(
        file=raw["basename"],
        documents=entry["samples"],
        tokens=tokens,
        size=raw["bytes"],
        digest=raw["hashes"][DIGEST],
        packed=packed["bytes"] if packed else None,
    )
