"""Inputs, the documents that they hold, and the count of those that are left out on the way to a part."""

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
SHOWN = 5  # bad entries of an input, and names of a list, that a message shows one by one
HOPELESS = 1000  # entries without a good one among them, after which no more are read
LONGEST_NAME = 100


class PrepareError(ValueError):
    """Tokens that can't be prepared; the text says why, and what would work."""


class InputError(PrepareError):
    """An input that can't be used."""


class ArgumentError(PrepareError):
    """What was asked for can't be done, whatever is in the inputs."""


@dataclass(frozen=True)
class Input:
    """What one part is made from: a file; a shard of an MDS folder, after its index; or a run of text files.

    `texts` are the bytes of all documents, where its files do not say.
    """

    format: str
    files: tuple[Path, ...]
    shard: int = 0
    texts: int | None = None

    @property
    def file(self) -> Path:
        """The one that holds the documents, or the first that does."""
        return self.files[-1 if self.format == "mds" else 0]

    @property
    def name(self) -> str:
        more = f" and {len(self.files) - 1} more" if self.format == "text" and len(self.files) > 1 else ""
        return f"{self.file}{more}" if self.files else self.format

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return sum(file.stat().st_size for file in self.files) if self.texts is None else self.texts

    def stamps(self) -> list[list[int]]:
        """Size and time of each file: what shows whether one was changed."""
        return [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in self.files)]


class Learned(NamedTuple):
    """Which characters of a text are learned: from the first of each span to before its second.

    apart: the text is cut at the boundaries of the spans before it is tokenized
    special: special tokens that the text spells are these tokens, not words like any other
    """

    spans: tuple[tuple[int, int], ...]
    apart: bool = False
    special: bool = False


class Document(NamedTuple):
    """A text, or tokens that another program made; `where` is its place, for messages.

    learned: which of its characters, or of its tokens (1 or 0 for each), are learned; None where all are
    """

    content: str | np.ndarray
    source: str
    where: str
    learned: Learned | np.ndarray | None = None


@dataclass(frozen=True)
class InputOptions:
    """How inputs are read: the key or column of the text, the source where none is named, what parts packed tokens.

    learn: the form in which inputs say what is learned (`learned.py`); None where all of it is
    chat: the tokenizer's template of conversations
    """

    text_key: str = "text"
    source: str = "text"
    separator: int | None = None
    learn: str | None = None
    chat: ChatTemplate | None = None


@dataclass
class Tally:
    """What reading an input has come to. `entries` are lines, rows, files or samples, `position` bytes of its files.

    `short` and `long` are documents that a limit of their tokens left out.
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
        """Whether a text, or tokens, have something in them; counts those that have not."""
        empty = not len(content) or (isinstance(content, str) and content.isspace())
        self.empty += empty
        return not empty

    def reject(self, where: str, why: str) -> None:
        """Count a bad entry; InputError where there was never a good one."""
        self.bad += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{where}: {why[:200]}")
        if self.bad == self.entries == HOPELESS and self.max_bad < 1:
            raise InputError(f"{self.bad_entries()}\nnot one of the first {HOPELESS} is good; correct the input")

    def judge(self) -> None:
        """InputError where more than this share is bad. It is rounded up: above 0, one bad entry is always allowed."""
        if self.bad > math.ceil(self.max_bad * self.entries - 1e-9):
            cure = f"--max-bad {self.max_bad:.6g} allows less; correct the input, or allow more"
            raise InputError(f"{self.bad_entries()}\n{cure}")

    def bad_entries(self) -> str:
        """The bad entries, in words."""
        listed = "".join(f"\n  {example}" for example in self.examples)
        more = f"\n  and {self.bad - len(self.examples)} more" if self.bad > len(self.examples) else ""
        return f"{self.name}: {self.bad} of {self.entries} {self.noun} are bad and left out{listed}{more}"


Files = tuple[Path, ...]


def _alone(file: Path) -> list[Files]:
    return [(file,)]


@dataclass(frozen=True)
class Format:
    """One format of inputs.

    described: what its files are, a line of --help
    read: the documents of an input, in its order. What can't be read as one is counted and left out (`Tally`);
        InputError, OSError or EOFError where the input is damaged
    suffixes: how the names of its files end, in small letters
    noun: what it has entries of
    files: the files of each input that a file of such a name stands for; none where it is of another format
    learn: the forms in which its files can say what is learned
    """

    described: str
    read: Callable[[Input, InputOptions, Tally], Iterator[Document]]
    suffixes: tuple[str, ...] = ()
    noun: str = "documents"
    files: Callable[[Path], list[Files]] = _alone
    learn: tuple[str, ...] = ()


@lru_cache(maxsize=1000)
def clean_name(name: str) -> str:
    """A source's name as a part of paths: `Github (v2)` -> `Github-v2`. Names that become the same are one source."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-._")
    return cleaned or f"source-{digest_of(name.encode(errors='replace'))[:8]}"


def check_regular(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise ArgumentError(f"{file} is not a regular file; a device, a pipe or a folder can't be read as one")


def listed(names: Sequence[object]) -> str:
    """The first few of them, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def in_runs(items: Iterable[Item], size_of: Callable[[Item], int], enough: int, most: int) -> Iterator[list[Item]]:
    """Items in their order, as many together as reach a size that is enough, or the most there may be."""
    run, size = list[Item](), 0
    for item in items:
        run.append(item)
        size += size_of(item)
        if size >= enough or len(run) == most:
            yield run
            run, size = [], 0
    if run:
        yield run


def in_validation(content: str | np.ndarray, share: float) -> bool:
    """Whether a document is held out: by its content, so that copies of it are on the same side, wherever they are.

    Tokens are placed by their own values, so that a text and its tokens may be on different sides.
    """
    data = content.encode() if isinstance(content, str) else content.astype("<u4").tobytes()
    return xxhash.xxh3_64_intdigest(data) < share * 2**64
