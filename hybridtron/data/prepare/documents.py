"""Inputs, their documents, and counts of the entries that are left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import xxhash

from hybridtron.storage.digest import digest_of

if TYPE_CHECKING:
    from hybridtron.data.prepare.chat import ChatTemplate

Item = TypeVar("Item")
SHOWN = 5  # bad entries, or names in a list, that a message shows before "and N more"
HOPELESS = 1000  # bad entries at an input's start, without a good one, after which reading stops
LONGEST_NAME = 100


class PrepareError(ValueError):
    """Raised when tokens can't be prepared. The message gives the reason, and a remedy."""


class InputError(PrepareError):
    """Raised when an input can't be used."""


class ArgumentError(PrepareError):
    """Raised when the arguments can't be satisfied, whatever the inputs hold."""


@dataclass(frozen=True)
class Input:
    """One input: a file, a shard of an MDS folder after its index, or a group of text files.

    shard: the shard's number in an MDS index
    texts: bytes in all documents; None where these are the sizes of its files
    """

    format: str
    files: tuple[Path, ...]
    shard: int = 0
    texts: int | None = None

    @property
    def file(self) -> Path:
        """The file that holds the documents, or the first of them."""
        return self.files[-1 if self.format == "mds" else 0]

    @property
    def name(self) -> str:
        """A name for messages."""
        if self.format == "text" and len(self.files) > 1:
            more = f" and {len(self.files) - 1} more"
        else:
            more = ""
        if self.files:
            return f"{self.file}{more}"
        return self.format

    @cached_property
    def size(self) -> int:
        """Size in bytes."""
        if self.texts is None:
            return sum(file.stat().st_size for file in self.files)
        return self.texts

    def stamps(self) -> list[list[int]]:
        """Return size and mtime of each file, which reveal whether it was changed."""
        return [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in self.files)]


class Learned(NamedTuple):
    """The learned characters in a text, as spans (begin, end).

    apart: the text is cut at the spans' boundaries before it is tokenized
    special: special tokens in the text become these tokens, and are not ordinary text
    """

    spans: tuple[tuple[int, int], ...]
    apart: bool = False
    special: bool = False


class Document(NamedTuple):
    """A text, or tokens from another program. `where` is its place, for messages.

    learned: which characters, or which tokens (1 or 0 for each), are learned; None where all are
    """

    content: str | np.ndarray
    source: str
    where: str
    learned: Learned | np.ndarray | None = None


@dataclass(frozen=True)
class InputOptions:
    """Settings for reading inputs.

    text_key: key or column that holds the text
    source: name of the source where the input names none
    separator: token between documents in packed tokens
    learn: form in which inputs mark learned parts (`learned.py`); None where everything is learned
    chat: the tokenizer's chat template
    """

    text_key: str = "text"
    source: str = "text"
    separator: int | None = None
    learn: str | None = None
    chat: ChatTemplate | None = None


@dataclass
class Tally:
    """Counts from reading one input.

    noun: name of its entries in messages, such as lines, rows, files or samples
    max_bad: fraction of entries that may be bad
    short, long: documents that a limit on their tokens left out
    position: bytes of its files that have been read
    examples, remarks: messages about bad entries, and about the input
    """

    name: str
    noun: str
    max_bad: float
    entries: int = 0
    bad: int = 0
    empty: int = 0
    short: int = 0
    long: int = 0
    position: int = 0
    examples: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def keeps(self, content: str | np.ndarray) -> bool:
        """Return True for a text, or tokens, with content. Counts those that are empty or only white space."""
        empty = not len(content) or (isinstance(content, str) and content.isspace())
        self.empty += empty
        return not empty

    def reject(self, where: str, why: str) -> None:
        """Count a bad entry; raise InputError if the first HOPELESS entries are all bad."""
        self.bad += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{where}: {why[:200]}")
        if self.bad == self.entries == HOPELESS and self.max_bad < 1:
            raise InputError(f"{self.bad_entries()}\nnot one of the first {HOPELESS} is good; correct the input")

    def judge(self) -> None:
        """Raise InputError if the share of bad entries is above max_bad.

        The limit is rounded up: above 0, one bad entry is always allowed.
        """
        if self.bad > math.ceil(self.max_bad * self.entries - 1e-9):
            cure = f"--max-bad {self.max_bad:.6g} allows less; correct the input, or allow more"
            raise InputError(f"{self.bad_entries()}\n{cure}")

    def bad_entries(self) -> str:
        """Describe the bad entries for a message."""
        listed = "".join(f"\n  {example}" for example in self.examples)
        if self.bad > len(self.examples):
            more = f"\n  and {self.bad - len(self.examples)} more"
        else:
            more = ""
        return f"{self.name}: {self.bad} of {self.entries} {self.noun} are bad and left out{listed}{more}"


Files = tuple[Path, ...]


def _alone(file: Path) -> list[Files]:
    return [(file,)]


@dataclass(frozen=True)
class Format:
    """A format that inputs can have.

    described: a line for --help that describes its files
    read: yields an input's documents, in order. An entry that can't be read is counted and left out (`Tally`); a
        damaged input raises InputError, OSError or EOFError
    suffixes: its file name endings, in lower case
    noun: name of its entries, in the plural
    files: returns each input's files for a file with such a name; none if its content has another format
    learn: forms in which its files can mark learned parts
    """

    described: str
    read: Callable[[Input, InputOptions, Tally], Iterator[Document]]
    suffixes: tuple[str, ...] = ()
    noun: str = "documents"
    files: Callable[[Path], list[Files]] = _alone
    learn: tuple[str, ...] = ()


@lru_cache(maxsize=1000)
def clean_name(name: str) -> str:
    """Turn a source's name into a part of paths: `Github (v2)` -> `Github-v2`.

    Names that become equal are one source.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-._")
    return cleaned or f"source-{digest_of(name.encode(errors='replace'))[:8]}"


def check_regular(file: Path) -> None:
    """Raise ArgumentError if a file exists but is not regular."""
    if file.exists() and not file.is_file():
        raise ArgumentError(f"{file} is not a regular file; a device, a pipe or a folder can't be read as one")


def listed(names: Sequence[object]) -> str:
    """List the first few names for a message."""
    if len(names) > SHOWN:
        more = f" and {len(names) - SHOWN} more"
    else:
        more = ""
    return ", ".join(map(str, names[:SHOWN])) + more


def in_runs(items: Iterable[Item], size_of: Callable[[Item], int], enough: int, most: int) -> Iterator[list[Item]]:
    """Yield consecutive items in groups. A group ends when its size reaches `enough`, or its number of items `most`."""
    run = list[Item]()
    size = 0
    for item in items:
        run.append(item)
        size += size_of(item)
        if size >= enough or len(run) == most:
            yield run
            run = []
            size = 0
    if run:
        yield run


def in_validation(content: str | np.ndarray, share: float) -> bool:
    """Return True if a document is held out. Its content decides, so that all copies are on the same side.

    share: fraction of documents that are held out

    Tokens are hashed by their own values, so a text and its tokens may be on different sides.
    """
    if isinstance(content, str):
        data = content.encode()
    else:
        data = content.astype("<u4").tobytes()
    return xxhash.xxh3_64_intdigest(data) < share * 2**64
