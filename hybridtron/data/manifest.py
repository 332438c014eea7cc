"""The manifest.json in a folder of prepared tokens, which describes all its files. Needs no torch.

A folder without masks has the same manifest, byte for byte, as before masks existed.
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
USUAL = 2**20  # assumed bytes of a manifest, an index or a tokenizer, for the time limit of its fetch
DIGEST = "xxh3_128"  # the digest's name in MDS indexes
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
    """Collect a dataclass's fields for JSON. `learned` is left out where there are no masks."""
    return {key: value for key, value in fields if (key, value) != ("learned", None)}


def _own_digest(values: dict) -> str:
    """Return the digest that a manifest stores about itself. It does not depend on the JSON's formatting."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True)
class DataShard:
    """One shard: its file below the source's folder, and its contents.

    size, digest: those of the uncompressed file
    packed: size in compressed form; None if it is stored uncompressed
    learned: number of learned tokens; None if it has no masks, so that all tokens are learned
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
    """One source's part of a split: its shards, and the digests of index.json and lengths.npy."""

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
        """Yield faults in the file descriptions."""
        if not (isinstance(self.index, str) and isinstance(self.lengths, str)):
            yield "its index or its lengths have no digest"
        for number, shard in enumerate(self.shards):
            optional_counts = (0 if count is None else count for count in (shard.packed, shard.learned))
            counts = (shard.documents, shard.tokens, shard.size, *optional_counts)
            if not (all(map(_is_count, counts)) and isinstance(shard.file, str) and isinstance(shard.digest, str)):
                yield f"shard {number} has no name, counts or digest that could be right"
            elif shard.size == 0:  # a shard begins with its number of samples; and an empty file can't be mapped
                yield f"shard {number}, {shard.file}, has a size of 0 bytes"

    @staticmethod
    def parse(values: dict) -> SourceSplit:
        return SourceSplit(values["index"], values["lengths"], tuple(DataShard(**shard) for shard in values["shards"]))


@dataclass(frozen=True)
class DataManifest:
    """Contents of manifest.json. `origin` records where the text came from, and does not affect how tokens are read."""

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
        """Parse the JSON of a folder's manifest; raise FolderError if it is faulty or was changed."""
        try:
            values = json.loads(text)
            stored_digest = values.pop("digest", None)  # folders of earlier versions have none
            if values["format"] != FORMAT:
                raise FolderError(
                    folder, f"has format {values['format']}; this version reads format {FORMAT}: prepare it again"
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
            raise FolderError(folder, "has a manifest.json that differs from its own digest: it was changed")
        return manifest

    def faults(self) -> Iterator[str]:
        """Yield faults: values that no valid manifest has."""
        if not (_is_count(self.vocab_size) and _is_count(self.eos) and self.eos < self.vocab_size):
            yield f"has a manifest.json with a vocabulary of {self.vocab_size!r} entries and eos {self.eos!r}"
        if self.dtype not in DTYPES:
            yield f"has tokens of dtype {self.dtype!r}; {' and '.join(DTYPES)} are known"
        if self.compression is not None and not _COMPRESSION.fullmatch(str(self.compression)):
            yield f"has compression {self.compression!r}; zstd, zstd:3 and the like are known"
        if not isinstance(self.origin, dict) or not isinstance(self.tokenizer, str):
            yield "has a manifest.json that does not say where its tokens come from"
        for split, sources in self.splits.items():
            for name, of_source in sources.items():
                if fault := next(of_source.faults(), None):
                    yield f"has a manifest.json with a fault in {split}/{name}: {fault}"
        for name in [*self.beside, *(f"{where}/{shard.file}" for where, shard in self.shards())]:
            if not all(_SAFE_NAME.fullmatch(part) for part in name.split("/")):
                yield f"has a manifest.json that names {name!r}, which is not a name inside the folder"

    def dumps(self) -> str:
        """Return the manifest as JSON, with its own digest."""
        values = json.loads(json.dumps(asdict(self, dict_factory=_stored)))
        return json.dumps({"digest": _own_digest(values), **values}, indent=1) + "\n"

    @cached_property
    def beside(self) -> dict[str, tuple[str, int]]:
        """Files beside the shards: name -> digest and size in bytes, exact or usual."""
        files = {"tokenizer.json": (self.tokenizer, USUAL)}
        for split, sources in self.splits.items():
            for source, source_split in sources.items():
                files[f"{split}/{source}/index.json"] = source_split.index, USUAL
                files[f"{split}/{source}/lengths.npy"] = source_split.lengths, 128 + 4 * source_split.documents
        return files

    def shards(self) -> Iterator[tuple[str, DataShard]]:
        """Yield (folder, shard) for every shard, where the folder is its source's, such as train/web."""
        for split, sources in self.splits.items():
            for source, of_source in sources.items():
                yield from ((f"{split}/{source}", shard) for shard in of_source.shards)

    def tokens(self, split: str) -> int:
        """Return a split's number of tokens, over all sources."""
        return sum(of_source.tokens for of_source in self.splits[split].values())

    def stored_name(self, shard: DataShard) -> str:
        """Return the name under which the folder stores a shard. It has a suffix if the shard is compressed."""
        if self.compression is None:
            return shard.file
        return f"{shard.file}.{self.compression.split(':')[0]}"
