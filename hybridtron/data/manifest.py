"""The manifest.json in a folder with prepared tokens: sizes, counts and digests of the folder's files. Needs no torch.

A token is learned if it counts in the loss as a label. Loss masks mark the learned tokens; in a folder without masks
all tokens are learned. The JSON for a shard without masks has no field `learned`. So the manifest for a folder without
masks has the same bytes as a manifest from early versions of hybridtron, which had no masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from hybridtron.problems import Code
from hybridtron.storage.digest import digest_of

FORMAT = 2
SPLITS = ("train", "validation")
DTYPES = ("uint16", "uint32")
USUAL = 2**20  # assumed size in bytes of a manifest, index or tokenizer; it determines the download's time limit
DIGEST = "xxh3_128"  # name of the hash algorithm in MDS indexes
_COMPRESSION = re.compile(r"(zstd|zip|gz|bz2|br|snappy)(:\d+)?")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FolderError(ValueError):
    """Raised when a folder can't be used. `fault` is the message without the folder's name."""

    def __init__(self, folder: Path | str, fault: str, *, code: Code = "unreadable") -> None:
        super().__init__(f"{folder} {fault}")
        self.fault = fault
        self.code: Code = code


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _stored(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Return a dataclass's fields as a dict, without the field `learned` if its value is None."""
    return {key: value for key, value in fields if (key, value) != ("learned", None)}


def _own_digest(values: dict) -> str:
    """Compute a manifest's digest from its contents, independent of the JSON's formatting."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True)
class DataShard:
    """One shard in a source.

    file: the uncompressed file's path, relative to the source's folder
    documents, tokens: document count and token count
    size, digest: the uncompressed file's size in bytes, and its digest
    packed: the compressed file's size in bytes; None if the shard is stored uncompressed
    learned: how many tokens are learned; None if the shard has no masks
    """

    file: str
    documents: int
    tokens: int
    size: int
    digest: str
    packed: int | None = None
    learned: int | None = None


@dataclass(frozen=True)
class SourceSplit:
    """One source's part of a split.

    index, lengths: digests of index.json and lengths.npy
    """

    index: str
    lengths: str
    shards: tuple[DataShard, ...]

    @cached_property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def learned(self) -> int | None:
        """Number of learned tokens; None if no shard has masks."""
        if all(shard.learned is None for shard in self.shards):
            return None
        return sum(shard.tokens if shard.learned is None else shard.learned for shard in self.shards)

    def faults(self) -> Iterator[str]:
        """Yield a message for each shard with impossible values, and a message if a digest is not a string."""
        if not (isinstance(self.index, str) and isinstance(self.lengths, str)):
            yield "the digest of index.json or of lengths.npy is not a string"
        for number, shard in enumerate(self.shards):
            optional_counts = (0 if count is None else count for count in (shard.packed, shard.learned))
            counts = (shard.documents, shard.tokens, shard.size, *optional_counts)
            if not (all(map(_is_count, counts)) and isinstance(shard.file, str) and isinstance(shard.digest, str)):
                yield f"shard {number} has an impossible file name, count or digest"
            elif shard.size == 0:  # every shard begins with a header; and an empty file can't be memory-mapped
                yield f"shard {number}, {shard.file}, has a size of 0 bytes"

    @staticmethod
    def parse(values: dict) -> SourceSplit:
        return SourceSplit(values["index"], values["lengths"], tuple(DataShard(**shard) for shard in values["shards"]))


@dataclass(frozen=True)
class DataManifest:
    """Contents of manifest.json.

    eos: token id that ends every document
    compression: `zstd:3`, for example; None if shards are stored uncompressed
    tokenizer: tokenizer.json's digest
    splits: split -> source -> the source's part of the split
    origin: where the text came from; has no effect on how tokens are read
    """

    format: int
    vocab_size: int
    eos: int
    dtype: str
    compression: str | None
    tokenizer: str
    splits: dict[str, dict[str, SourceSplit]]
    origin: dict[str, str | int | float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, folder: Path | str) -> DataManifest:
        """Parse a folder's manifest from JSON; raise FolderError if a value is impossible or the digest is wrong."""
        try:
            values = json.loads(text)
            stored_digest = values.pop("digest", None)  # the first versions wrote no digest
            if values["format"] != FORMAT:
                raise FolderError(
                    folder,
                    f"has format {values['format']}, but this version reads format {FORMAT}: prepare the folder again",
                )
            splits = {
                split: {
                    name: SourceSplit.parse(source_values) for name, source_values in values["splits"][split].items()
                }
                for split in SPLITS
            }
            manifest = DataManifest(**(values | {"splits": splits}))
        except FolderError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FolderError(folder, f"has a manifest.json that does not parse: {error!r}") from error
        for fault in manifest.faults():
            raise FolderError(folder, fault)
        if stored_digest not in (None, _own_digest(values)):
            raise FolderError(folder, "has a manifest.json that was changed: its contents differ from its digest")
        return manifest

    def faults(self) -> Iterator[str]:
        """Yield a message for each impossible value."""
        if not (_is_count(self.vocab_size) and _is_count(self.eos) and self.eos < self.vocab_size):
            yield f"has a manifest.json with a vocabulary of {self.vocab_size!r} entries and eos {self.eos!r}"
        if self.dtype not in DTYPES:
            yield f"has tokens with dtype {self.dtype!r}, but only {' and '.join(DTYPES)} can be read"
        if self.compression is not None and not _COMPRESSION.fullmatch(str(self.compression)):
            yield f"has shards with the unknown compression {self.compression!r}; a known compression is zstd:3"
        if not isinstance(self.origin, dict) or not isinstance(self.tokenizer, str):
            yield "has a manifest.json whose origin is not an object, or whose tokenizer is not a digest"
        for split, sources in self.splits.items():
            for name, of_source in sources.items():
                if fault := next(of_source.faults(), None):
                    yield f"has a manifest.json with a fault in {split}/{name}: {fault}"
        for name in [*self.beside, *(f"{where}/{shard.file}" for where, shard in self.shards())]:
            if not all(_SAFE_NAME.fullmatch(part) for part in name.split("/")):
                yield f"has a manifest.json with the file name {name!r}, which is not allowed inside the folder"

    def dumps(self) -> str:
        """Return the manifest as JSON, with the digest of its contents."""
        values = json.loads(json.dumps(asdict(self, dict_factory=_stored)))
        return json.dumps({"digest": _own_digest(values), **values}, indent=1) + "\n"

    @cached_property
    def beside(self) -> dict[str, tuple[str, int]]:
        """Files other than shards: path in the folder -> (digest, size in bytes).

        Only the size of lengths.npy is exact: a 128-byte header, then 4 bytes per document. The manifest does not store
        the sizes of tokenizer.json and index.json, so USUAL stands for them.
        """
        files = {"tokenizer.json": (self.tokenizer, USUAL)}
        for split, sources in self.splits.items():
            for source, source_split in sources.items():
                files[f"{split}/{source}/index.json"] = source_split.index, USUAL
                files[f"{split}/{source}/lengths.npy"] = source_split.lengths, 128 + 4 * source_split.documents
        return files

    def shards(self) -> Iterator[tuple[str, DataShard]]:
        """Yield (folder, shard) for every shard; `folder` is the folder of the shard's source, such as train/web."""
        for split, sources in self.splits.items():
            for source, of_source in sources.items():
                yield from ((f"{split}/{source}", shard) for shard in of_source.shards)

    def tokens(self, split: str) -> int:
        """Count a split's tokens, over all sources."""
        return sum(of_source.tokens for of_source in self.splits[split].values())

    def stored_name(self, shard: DataShard) -> str:
        """Return the path at which a shard is stored: `shard.file`, with a suffix such as .zstd if it is compressed."""
        if self.compression is None:
            return shard.file
        return f"{shard.file}.{self.compression.split(':')[0]}"
