"""A folder of prepared tokens: its format, how it is written, and what a configuration check can say about it.

    manifest.json          format version, vocabulary, eos, dtype, digests, documents and tokens of each split
    tokenizer.json         the tokenizer that made the tokens, in the form of the `tokenizers` package
    train.tokens           every document's tokens, one after the other, flat little-endian uint16 or uint32
    train.lengths.npy      int64, tokens of each document; the last token of each is eos
    validation.tokens, validation.lengths.npy

The length of a row is not part of it: one folder serves every phase. Nothing here needs torch, and opening a folder
reads no tokens: sizes are held against the manifest, contents only by `TokenFolder.verify`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hybridtron.config.schema import Config, DataConfig, PhaseConfig, Source
from hybridtron.specs.base import Problem

FORMAT = 1
SPLITS = ("train", "validation")
SMALLEST_VOCABULARY = 300  # 256 bytes, eos, and a few merges


class FolderError(ValueError):
    """A folder that can't be used, and why."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(f"{folder} {fault}")


@dataclass(frozen=True)
class Split:
    """One split: how many documents and tokens it has, and the digest of its two files."""

    documents: int
    tokens: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says. `origin` tells where the text came from; nothing in it changes how tokens are read."""

    format: int
    vocab_size: int
    eos: int
    dtype: str
    tokenizer: str
    splits: dict[str, Split]
    origin: dict[str, str | int] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, folder: Path) -> Manifest:
        """The manifest from its JSON, or FolderError about the folder it is of."""
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise FolderError(folder, f"has format {values['format']}; this version reads format {FORMAT}")
            splits = {name: Split(**values["splits"][name]) for name in SPLITS}
            manifest = Manifest(**(values | {"splits": splits}))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise FolderError(folder, f"has a manifest.json that does not parse: {error}") from error
        if manifest.dtype not in ("uint16", "uint32"):
            raise FolderError(folder, f"has tokens of dtype {manifest.dtype!r}; uint16 and uint32 are known")
        return manifest


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder. Tokens are memory-mapped, so that any number of processes share them."""

    path: Path
    manifest: Manifest
    digest: str

    @staticmethod
    def open(path: Path) -> TokenFolder:
        """The folder, its sizes and its tokenizer held against the manifest; FolderError where they disagree."""
        if not path.is_dir():
            raise FolderError(path, "is not a folder" if path.exists() else "does not exist")
        try:
            text = (path / "manifest.json").read_text()
            folder = TokenFolder(path, Manifest.parse(text, path), _digest(text.encode()))
            if _digest(folder.tokenizer_file.read_bytes()) != folder.manifest.tokenizer:
                raise FolderError(path, "has a tokenizer.json that is not the one its tokens were made with")
            for split in SPLITS:
                folder._check_sizes(split)
        except FileNotFoundError as error:
            raise FolderError(path, f"has no {Path(error.filename).name}: not a folder of prepared tokens") from error
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(path, f"can't be read: {error}") from error
        return folder

    @property
    def tokenizer_file(self) -> Path:
        """Where the tokenizer stands."""
        return self.path / "tokenizer.json"

    def tokens(self, split: str) -> np.ndarray:
        """Every token of a split, memory-mapped."""
        if not self.manifest.splits[split].tokens:
            return np.empty(0, self._dtype)
        return np.memmap(self._tokens_file(split), self._dtype, mode="r")

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each document, memory-mapped int64; their sum is held against the manifest."""
        lengths = self._open_lengths(split)
        expected = self.manifest.splits[split].tokens
        if int(lengths.sum()) != expected or (len(lengths) and lengths.min() < 1):
            raise FolderError(
                self.path, f"has lengths in {split}.lengths.npy that do not add up to its {expected} tokens"
            )
        return lengths

    def verify(self) -> None:
        """Read everything and hold it against the digests; FolderError where a byte differs."""
        for split in SPLITS:
            if _split_digest(self._tokens_file(split), self.lengths(split)) != self.manifest.splits[split].digest:
                raise FolderError(self.path, f"has other contents in split {split!r} than its manifest says")

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    def _tokens_file(self, split: str) -> Path:
        return self.path / f"{split}.tokens"

    def _open_lengths(self, split: str) -> np.ndarray:
        try:
            return np.load(self.path / f"{split}.lengths.npy", mmap_mode="r" if self._documents(split) else None)
        except (ValueError, EOFError) as error:
            raise FolderError(self.path, f"has a damaged {split}.lengths.npy: {error}") from error

    def _documents(self, split: str) -> int:
        return self.manifest.splits[split].documents

    def _check_sizes(self, split: str) -> None:
        expected = self.manifest.splits[split].tokens * self._dtype.itemsize
        if (found := self._tokens_file(split).stat().st_size) != expected:
            kind = "truncated" if found < expected else "too long"
            raise FolderError(self.path, f"has a {kind} {split}.tokens: {found} bytes, {expected} by its manifest")
        lengths = self._open_lengths(split)
        if lengths.shape != (self._documents(split),) or lengths.dtype != np.int64:
            raise FolderError(self.path, f"has a {split}.lengths.npy of another shape than its manifest says")


def write_folder(
    path: Path,
    splits: Mapping[str, Iterable[Sequence[int] | np.ndarray]],
    tokenizer: str,
    vocab_size: int,
    eos: int,
    origin: Mapping[str, str | int],
) -> TokenFolder:
    """Write documents (without eos, which is added) beside `path` and rename; a folder already there is kept."""
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    aside.mkdir()
    try:
        (aside / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        written = {name: _write_split(aside, name, splits[name], dtype, vocab_size, eos) for name in SPLITS}
        digest = _digest(tokenizer.encode())
        manifest = Manifest(FORMAT, vocab_size, eos, dtype, digest, written, dict(origin))
        (aside / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")
        try:
            aside.rename(path)
        except OSError:  # somebody else's folder stands there by now
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return TokenFolder.open(path)


def _write_split(
    folder: Path, name: str, documents: Iterable[Sequence[int] | np.ndarray], dtype: str, vocab_size: int, eos: int
) -> Split:
    counts = []
    with (folder / f"{name}.tokens").open("wb") as file:
        for document in documents:
            tokens = np.append(np.asarray(document, dtype=np.int64), eos)
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(f"document {len(counts)} of {name} has tokens outside of 0..{vocab_size - 1}")
            file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            counts.append(len(tokens))
    lengths = np.array(counts, dtype=np.int64)
    np.save(folder / f"{name}.lengths.npy", lengths)
    return Split(len(lengths), int(lengths.sum()), _split_digest(folder / f"{name}.tokens", lengths))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _split_digest(tokens_file: Path, lengths: np.ndarray) -> str:
    with tokens_file.open("rb") as file:
        digest = hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16))
    digest.update(lengths.astype("<i8").tobytes())
    return digest.hexdigest()


def problems(config: Config) -> list[Problem]:
    """What is wrong with the data of each phase, as far as it can be seen without reading tokens."""
    found = [p for index, phase in enumerate(config.phases) for p in _phase_problems(config, index, phase)]
    return list(dict.fromkeys(found))


def _phase_problems(config: Config, index: int, phase: PhaseConfig) -> list[Problem]:
    data = config.data_of(phase)
    key = "data.path" if phase.data.path is None else f"phases.{index}.data.path"
    vocab_size = config.model.vocab_size
    if data.source == Source.embedded and vocab_size < SMALLEST_VOCABULARY:
        needs = f"data.source=embedded makes a byte-level vocabulary, which needs at least {SMALLEST_VOCABULARY}"
        return [Problem("model.vocab_size", f"is {vocab_size}; {needs}")]
    path = Path(data.path)
    if data.source == Source.embedded and not path.exists():
        return []
    try:
        folder = TokenFolder.open(path)
    except FolderError as error:
        cure = (
            "delete it, and it is prepared anew; or set another path"
            if data.source == Source.embedded
            else "give a folder of prepared tokens, or set data.source=embedded, which makes its own"
        )
        return [Problem(key, f"{error}; {cure}")]
    return _vocabulary_problems(key, data, folder, vocab_size) + _size_problems(key, config, phase, folder)


def _vocabulary_problems(key: str, data: DataConfig, folder: TokenFolder, vocab_size: int) -> list[Problem]:
    """An embedded folder must have been made for this vocabulary size; any other may be smaller than the model's."""
    has = folder.manifest.vocab_size
    if data.source == Source.embedded:
        made_for = folder.manifest.origin.get("asked_vocab_size", has)
        if vocab_size in (has, made_for):
            return []
        cure = f"set model.vocab_size={made_for}, or a path where a vocabulary of {vocab_size} can be prepared"
    elif has <= vocab_size:
        return []
    else:
        cure = f"set model.vocab_size={has} or more, or use other tokens"
    return [Problem(key, f"{data.path} has a vocabulary of {has}, model.vocab_size is {vocab_size}; {cure}")]


def _size_problems(key: str, config: Config, phase: PhaseConfig, folder: TokenFolder) -> list[Problem]:
    longest = phase.seq_len * max((1, *config.run.eval_lengths))
    found = []
    for split, seq_len, cure in (
        ("train", phase.seq_len, "a smaller seq_len"),
        ("validation", longest, "smaller run.eval_lengths or seq_len"),
    ):
        has = folder.manifest.splits[split].tokens
        if has <= seq_len:
            message = f"has {has} {split} tokens, and one row takes {seq_len + 1}; {cure} or more text works"
            found.append(Problem(key, f"{folder.path} {message}"))
    return found
