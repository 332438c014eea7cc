"""A folder of prepared tokens: its format, how it is opened, and what a configuration check can say about it.

    manifest.json                       vocabulary, eos, dtype, and of every shard its size, counts and digest
    tokenizer.json                      the tokenizer that made the tokens, in the form of the `tokenizers` package
    train/SOURCE/index.json             an MDS dataset as mosaicml-streaming writes it, one sample a document
    train/SOURCE/PART/shard.00000.mds   its shards; with compression .mds.zstd
    train/SOURCE/lengths.npy            uint32, tokens of each document; the last token of each is eos
    validation/SOURCE/...

The length of a row is not part of it: one folder serves every phase. Nothing here needs torch, and opening a folder
reads no tokens: sizes are compared with the manifest here, contents where a shard is used (`mds/store.py`).
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from hybridtron.regular_files import Unreadable, read_regular
from hybridtron.storage.digest import digest_of

FORMAT = 2
SPLITS = ("train", "validation")
DTYPES = ("uint16", "uint32")
LARGEST_MANIFEST = 2**30  # bytes: four million shards
LARGEST_INDEX = 2**28  # bytes of one source's index.json: half a million shards
LARGEST_TOKENIZER = 2**28  # bytes; a vocabulary of 256 thousand entries takes 2**25
SMALLEST_VOCABULARY = 300  # 256 bytes, eos, and a few merges
DIGEST = "xxh3_128"  # the name by which MDS indexes know it
_COMPRESSION = re.compile(r"(zstd|zip|gz|bz2|br|snappy)(:\d+)?")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FolderError(ValueError):
    """A folder that can't be used, and why."""

    def __init__(self, folder: Path | str, fault: str) -> None:
        super().__init__(f"{folder} {fault}")


def safe_name(name: str) -> bool:
    """Whether a name can be a part of a path below the folder, and nothing else."""
    return bool(_SAFE_NAME.fullmatch(name))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _own_digest(values: dict) -> str:
    """What a manifest carries of itself, whatever the form of its JSON."""
    return digest_of(json.dumps(values, sort_keys=True).encode())


@dataclass(frozen=True)
class DataShard:
    """One shard: its file below the source's folder, and what is in it. `packed` is its size where it is compressed."""

    file: str
    documents: int
    tokens: int
    size: int
    digest: str
    packed: int | None = None


@dataclass(frozen=True)
class SourceSplit:
    """One source's part of a split: its shards, and the digests of its index and its document lengths."""

    index: str
    lengths: str
    shards: tuple[DataShard, ...]

    @cached_property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def faults(self) -> Iterator[str]:
        """What is of no use in the description of its files."""
        if not (isinstance(self.index, str) and isinstance(self.lengths, str)):
            yield "its index or its lengths have no digest"
        for number, shard in enumerate(self.shards):
            counts = (shard.documents, shard.tokens, shard.size, 0 if shard.packed is None else shard.packed)
            if not (all(map(_is_count, counts)) and isinstance(shard.file, str) and isinstance(shard.digest, str)):
                yield f"shard {number} has no name, counts or digest that could be right"

    @staticmethod
    def parse(values: dict) -> SourceSplit:
        return SourceSplit(values["index"], values["lengths"], tuple(DataShard(**shard) for shard in values["shards"]))


@dataclass(frozen=True)
class DataManifest:
    """What manifest.json says. `origin` says where the text came from; nothing in it changes how tokens are read."""

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
        """The manifest from its JSON, or FolderError about the folder it is of."""
        try:
            values = json.loads(text)
            own = values.pop("digest", None)  # folders of earlier versions have none
            if values["format"] != FORMAT:
                raise FolderError(
                    folder, f"has format {values['format']}; this version reads format {FORMAT}: prepare it again"
                )
            splits = {
                split: {name: SourceSplit.parse(of_source) for name, of_source in values["splits"][split].items()}
                for split in SPLITS
            }
            manifest = DataManifest(**(values | {"splits": splits}))
        except FolderError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FolderError(folder, f"has a manifest.json that does not parse: {error!r}") from error
        for fault in manifest.faults():
            raise FolderError(folder, fault)
        if own not in (None, _own_digest(values)):
            raise FolderError(folder, "has a manifest.json that differs from its own digest: it was changed")
        return manifest

    def faults(self) -> Iterator[str]:
        """What no manifest can say."""
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
        for name in self.unsafe_names():
            yield f"has a manifest.json that names {name!r}, which is not a name inside the folder"

    def dumps(self) -> str:
        values = json.loads(json.dumps(asdict(self)))
        return json.dumps({"digest": _own_digest(values), **values}, indent=1) + "\n"

    def unsafe_names(self) -> list[str]:
        """Names of sources and shards that could lead out of the folder."""
        sources = [(name, of_source) for split in self.splits.values() for name, of_source in split.items()]
        shards = [shard.file for _, of_source in sources for shard in of_source.shards]
        named = [name for name, _ in sources if not safe_name(name)]
        return named + [file for file in shards if not all(safe_name(part) for part in file.split("/"))]

    def tokens(self, split: str) -> int:
        """Tokens of all sources of a split."""
        return sum(of_source.tokens for of_source in self.splits[split].values())

    def stored_name(self, shard: DataShard) -> str:
        """The name of the file that the folder holds for a shard."""
        return shard.file if self.compression is None else f"{shard.file}.{self.compression.split(':')[0]}"


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder: where it stands, what its manifest says, and the digest of that.

    `remote` is the URL that its shards are fetched from; `path` then is the cache that they are kept in.
    """

    path: Path
    manifest: DataManifest
    digest: str
    remote: str | None = None

    @staticmethod
    def open(path: Path) -> TokenFolder:
        """A folder on this machine, its sizes and its tokenizer checked against the manifest; FolderError otherwise."""
        try:
            if not path.is_dir():
                raise FolderError(path, "is not a folder" if path.exists() else "does not exist")
            text = read_regular(path / "manifest.json", LARGEST_MANIFEST).decode()
            folder = TokenFolder(path, DataManifest.parse(text, path), digest_of(text.encode()))
            folder.check_tokenizer()
            for split in SPLITS:
                for source in folder.manifest.splits[split]:
                    folder._check_sizes(split, source)
        except FileNotFoundError as error:
            missing = Path(error.filename).relative_to(path)
            why = (
                ": not a folder of prepared tokens" if str(missing) == "manifest.json" else ", which its manifest names"
            )
            raise FolderError(path, f"has no {missing}{why}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(path, f"can't be read: {error}") from error
        return folder

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.remote or str(self.path)

    @property
    def tokenizer_file(self) -> Path:
        """Where the tokenizer stands."""
        return self.path / "tokenizer.json"

    def source_path(self, split: str, source: str) -> Path:
        """The folder of a source's shards."""
        return self.path / split / source

    def check_tokenizer(self) -> None:
        """FolderError where the tokenizer is not the one that the manifest names."""
        if digest_of(read_regular(self.tokenizer_file, LARGEST_TOKENIZER)) != self.manifest.tokenizer:
            raise FolderError(self.name, "has a tokenizer.json that is not the one its tokens were made with")

    def lengths(self, split: str, source: str) -> np.ndarray:
        """Tokens of each document of a source, memory-mapped uint32; checked against the manifest."""
        of_source, file = self.manifest.splits[split][source], self.source_path(split, source) / "lengths.npy"
        fault = f"has a {split}/{source}/lengths.npy that"
        try:
            if digest_of(read_regular(file, 2**10 + 4 * of_source.documents)) != of_source.lengths:
                raise FolderError(self.name, f"{fault} differs from the digest in its manifest")
            lengths = np.load(file, mmap_mode="r" if of_source.documents else None)
        except (ValueError, EOFError, OSError) as error:
            if isinstance(error, FolderError):
                raise
            raise FolderError(self.name, f"{fault} can't be read: {error}") from error
        if lengths.shape != (of_source.documents,) or lengths.dtype != np.uint32:
            raise FolderError(self.name, f"{fault} is {lengths.dtype}{lengths.shape}, not what its manifest says")
        if int(lengths.sum(dtype=np.int64)) != of_source.tokens or (len(lengths) and lengths.min() < 1):
            raise FolderError(self.name, f"{fault} does not add up to {of_source.tokens} tokens")
        return lengths

    def _check_sizes(self, split: str, source: str) -> None:
        folder = self.source_path(split, source)
        for file in ("index.json", "lengths.npy"):
            _size(folder / file)
        for shard in self.manifest.splits[split][source].shards:
            name = self.manifest.stored_name(shard)
            expected = shard.size if shard.packed is None else shard.packed
            if (found := _size(folder / name)) != expected:
                kind = "empty" if not found else "truncated" if found < expected else "too long"
                raise FolderError(
                    self.path, f"has a shard that is {kind}: {split}/{source}/{name} has {found} of {expected} bytes"
                )


def _size(file: Path) -> int:
    """Of a regular file; OSError where it is anything else."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{file} is not a regular file")
    return status.st_size
