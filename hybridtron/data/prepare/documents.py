"""Data types for preparing tokens: inputs, their formats, their documents, and counts of entries that are left out.

An entry is a part of an input that gives one document: a JSON line, a parquet row, a text file or an MDS sample.
"""

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

from hybridtron.problems import Unusable
from hybridtron.storage.digest import digest_of

if TYPE_CHECKING:
    from hybridtron.data.prepare.chat import ChatTemplate

Item = TypeVar("Item")
MAX_LISTED = 5  # maximum number of entries or names that a message lists before "and N more"
HOPELESS = 1000  # reading stops if this number of entries are bad, and no entry of the input has been good
MAX_NAME = 100  # maximum characters of a source's name


class PrepareError(Unusable):
    """Raised when tokens can't be prepared."""


class InputError(PrepareError):
    """Raised when an input can't be used."""


class ArgumentError(PrepareError):
    """Raised when the arguments are wrong, regardless of the inputs' contents."""


@dataclass(frozen=True)
class Input:
    """One input: a file, a shard in an MDS folder, or several text files.

    files: the input's files; for a shard in an MDS folder, first index.json and then the shard's file
    shard: the shard's index in an MDS index.json; 0 for other formats
    texts: total size of the documents in bytes; None to use the total size of the files
    """

    format: str
    files: tuple[Path, ...]
    shard: int = 0
    texts: int | None = None

    @property
    def file(self) -> Path:
        """The first file with documents."""
        return self.files[-1 if self.format == "mds" else 0]

    @property
    def name(self) -> str:
        """The input's name in messages."""
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
        """Return each file's size and mtime. A change of a file changes at least one of the two."""
        return [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in self.files)]


class Learned(NamedTuple):
    """The learned characters in a text: only they count in the loss.

    spans: (begin, end) character indices
    apart: whether the text is split at the spans' boundaries before it is tokenized
    special: True to encode a special token's name in the text as the special token, False to encode its characters
    """

    spans: tuple[tuple[int, int], ...]
    apart: bool = False
    special: bool = False


class Document(NamedTuple):
    """A text, or a document that another program has tokenized.

    where: the document's place for messages, such as a file and a line
    learned: for a text, the characters that count in the loss; for tokens, a 1 or 0 for each token; None if everything
        counts
    """

    content: str | np.ndarray
    source: str
    where: str
    learned: Learned | np.ndarray | None = None


@dataclass(frozen=True)
class InputOptions:
    """Settings for reading inputs.

    text_key: key or column that holds the text
    source: name of the source for documents whose source the input does not name
    separator: token id between documents in packed tokens
    learn: how inputs mark the documents' learned parts (`learned.py`); None if everything counts in the loss
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

    name: the input's name in messages
    noun: the word that messages use for the input's entries, such as lines, rows, files or samples
    max_bad: maximum fraction of entries that may be bad
    short, long: how many documents are left out because they have too few or too many tokens
    position: bytes read from the input's files so far
    examples: messages about the first bad entries
    remarks: messages about the input
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

    def accept(self, content: str | np.ndarray) -> bool:
        """Return True if a document has content; if it has only white space or nothing, count it as empty."""
        empty = not len(content) or (isinstance(content, str) and content.isspace())
        self.empty += empty
        return not empty

    def reject(self, where: str, why: str) -> None:
        """Count a bad entry; raise InputError if at least HOPELESS entries are bad and no entry is good.

        Some entries are rejected only after they are tokenized, in groups. Until then they count as good.
        """
        self.bad += 1
        if len(self.examples) < MAX_LISTED:
            self.examples.append(f"{where}: {why[:200]}")
        none_is_good = self.bad + self.empty == self.entries
        if none_is_good and self.bad >= HOPELESS and self.max_bad < 1:
            message = f"{self.bad_entries()}\nall of the first {self.entries} {self.noun} are bad; correct the input"
            raise InputError(message, code="malformed")

    def judge(self) -> None:
        """Raise InputError if the fraction of bad entries is above max_bad.

        The maximum number of bad entries is rounded up, so one bad entry is allowed if max_bad is above 0.
        """
        if self.bad > math.ceil(self.max_bad * self.entries - 1e-9):
            cure = f"--max-bad {self.max_bad:.6g} allows fewer; correct the input, or set a larger --max-bad"
            raise InputError(f"{self.bad_entries()}\n{cure}", code="malformed")

    def bad_entries(self) -> str:
        """Return a message that counts the bad entries and gives some examples."""
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

    described: a line for --help that describes the format's files
    read: function that yields an input's documents in order. It counts bad entries in the `Tally` and skips them, and
        raises InputError, OSError or EOFError for a damaged input.
    suffixes: how the format's file names end, in lower case
    noun: the word for an input's entries, in the plural
    files: function that gets the path to a file with one of these suffixes. It returns the files of each input that
        this path stands for, or an empty list if the file's content has another format.
    learn: the --learn values that the format supports
    """

    described: str
    read: Callable[[Input, InputOptions, Tally], Iterator[Document]]
    suffixes: tuple[str, ...] = ()
    noun: str = "documents"
    files: Callable[[Path], list[Files]] = _alone
    learn: tuple[str, ...] = ()


@lru_cache(maxsize=1000)
def clean_name(name: str) -> str:
    """Return a source's name in a form that suits paths: `Github-v2` for `Github (v2)`.

    Sources whose names become equal are merged.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:MAX_NAME].strip("-._")
    return cleaned or f"source-{digest_of(name.encode(errors='replace'))[:8]}"


def check_regular(file: Path) -> None:
    """Raise ArgumentError if a path exists but is not a regular file."""
    if file.exists() and not file.is_file():
        raise ArgumentError(
            f"{file} is a device, a pipe or a folder; only a regular file can be read", code="unreadable"
        )


def listed(names: Sequence[object]) -> str:
    """Return the first MAX_LISTED names as text for a message, and the number of further names."""
    if len(names) > MAX_LISTED:
        more = f" and {len(names) - MAX_LISTED} more"
    else:
        more = ""
    return ", ".join(map(str, names[:MAX_LISTED])) + more


def in_runs(items: Iterable[Item], size_of: Callable[[Item], int], enough: int, most: int) -> Iterator[list[Item]]:
    """Yield consecutive items in groups.

    A group ends when its items' sizes add up to `enough` or more, or when it has `most` items.
    """
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
    """Return whether a document belongs to the validation split.

    content: a text, or tokens. The content's hash decides, so equal contents are in the same split. A text and its
        tokens have different hashes, so they may be in different splits.
    share: fraction of documents in the validation split
    """
    if isinstance(content, str):
        data = content.encode()
    else:
        data = content.astype("<u4").tobytes()
    return xxhash.xxh3_64_intdigest(data) < share * 2**64
