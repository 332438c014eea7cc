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

from hybridtron.regular_files import Unreadable, path_inside, read_regular
from hybridtron.storage.digest import digest_of

FORMAT = 2
SPLITS = ("train", "validation")
DTYPES = ("uint16", "uint32")
LARGEST_MANIFEST = 2**30  # bytes: four million shards
LARGEST_INDEX = 2**28  # bytes of one source's index.json: half a million shards
LARGEST_TOKENIZER = 2**28  # bytes; a vocabulary of 256 thousand entries takes 2**25
USUAL = 2**20  # bytes of a manifest, an index or a tokenizer: what fetching one may take longer for
SMALLEST_VOCABULARY = 300  # 256 bytes, eos, and a few merges
DIGEST = "xxh3_128"  # the name by which MDS indexes know it
_COMPRESSION = re.compile(r"(zstd|zip|gz|bz2|br|snappy)(:\d+)?")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FolderError(ValueError):
    """A folder that can't be used, and why."""

    def __init__(self, folder: Path | str, fault: str) -> None:
        super().__init__(f"{folder} {fault}")
        self.fault = fault


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
        for name in [*self.beside, *(f"{where}/{shard.file}" for where, shard in self.shards())]:
            if not all(_SAFE_NAME.fullmatch(part) for part in name.split("/")):
                yield f"has a manifest.json that names {name!r}, which is not a name inside the folder"

    def dumps(self) -> str:
        values = json.loads(json.dumps(asdict(self)))
        return json.dumps({"digest": _own_digest(values), **values}, indent=1) + "\n"

    @cached_property
    def beside(self) -> dict[str, tuple[str, int]]:
        """The files beside the shards: the digest of each, and the bytes that it takes, or usually takes."""
        found = {"tokenizer.json": (self.tokenizer, USUAL)}
        for split, sources in self.splits.items():
            for source, has in sources.items():
                found[f"{split}/{source}/index.json"] = has.index, USUAL
                found[f"{split}/{source}/lengths.npy"] = has.lengths, 128 + 4 * has.documents
        return found

    def shards(self) -> Iterator[tuple[str, DataShard]]:
        """Every shard, and the place of its source."""
        for split, sources in self.splits.items():
            for source, of_source in sources.items():
                yield from ((f"{split}/{source}", shard) for shard in of_source.shards)

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
    def unchecked(path: Path) -> TokenFolder:
        """What a folder's manifest says, whatever is beside it."""
        text = read_regular(path / "manifest.json", LARGEST_MANIFEST).decode()
        return TokenFolder(path, DataManifest.parse(text, path), digest_of(text.encode()))

    @staticmethod
    def open(path: Path) -> TokenFolder:
        """A folder on this machine, its sizes and its tokenizer checked against the manifest; FolderError otherwise."""
        try:
            if not path.is_dir():
                raise FolderError(path, "is not a folder" if path.exists() else "does not exist")
            folder = TokenFolder.unchecked(path)
            folder._check_sizes()
            folder.verified("tokenizer.json")
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

    def verified(self, name: str) -> bytes:
        """A file beside the shards; FolderError where it is not the one that was written with the manifest."""
        digest, size = self.manifest.beside[name]
        try:
            if (file := path_inside(self.path, name)) is None:
                raise Unreadable("leads, or could lead, out of the folder: not opened")
            data = read_regular(file, size + LARGEST_INDEX)
        except OSError as error:
            raise FolderError(f"{self.name}/{name}", f"can't be read: {error}") from error
        if digest_of(data) != digest:
            raise FolderError(f"{self.name}/{name}", "differs from its digest in the manifest")
        return data

    def packed_digests(self, split: str, source: str) -> list[str | None]:
        """Of each shard as it is stored compressed. Nothing else is taken from index.json, which is for other readers.

        What it says need not be compared with the manifest: with the digest there, it is what was written beside it.
        """
        stored = self.verified(name := f"{split}/{source}/index.json")
        try:
            packed = [entry["zip_data"] for entry in json.loads(stored)["shards"]]
            digests = [None if info is None else info["hashes"][DIGEST] for info in packed]
            return [digest for digest, _ in zip(digests, self.manifest.splits[split][source].shards, strict=True)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FolderError(f"{self.name}/{name}", f"does not parse: {error!r}") from error

    def lengths(self, split: str, source: str) -> np.ndarray:
        """Tokens of each document of a source, memory-mapped uint32; checked against the manifest."""
        of_source, name = self.manifest.splits[split][source], f"{split}/{source}/lengths.npy"
        self.verified(name)
        try:
            lengths = np.load(self.path / name, mmap_mode="r" if of_source.documents else None)
        except (ValueError, EOFError, OSError) as error:
            raise FolderError(f"{self.name}/{name}", f"can't be read: {error}") from error
        if lengths.shape != (of_source.documents,) or lengths.dtype != np.uint32:
            fault = f"is {lengths.dtype}{lengths.shape}, not what the manifest says"
            raise FolderError(f"{self.name}/{name}", fault)
        if int(lengths.sum(dtype=np.int64)) != of_source.tokens or (len(lengths) and lengths.min() < 1):
            raise FolderError(f"{self.name}/{name}", f"does not add up to {of_source.tokens} tokens")
        return lengths

    def _check_sizes(self) -> None:
        for name in self.manifest.beside:
            _size(self.path / name)
        for where, shard in self.manifest.shards():
            name = f"{where}/{self.manifest.stored_name(shard)}"
            expected = shard.size if shard.packed is None else shard.packed
            if (found := _size(self.path / name)) != expected:
                kind = "empty" if not found else "truncated" if found < expected else "too long"
                raise FolderError(self.path, f"has a shard that is {kind}: {name} has {found} of {expected} bytes")


def _size(file: Path) -> int:
    """Of a regular file; OSError where it is anything else."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{file} is not a regular file")
    return status.st_size
