"""Documents on their way from an input to a part, and the count of those that are left out on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from hybridtron.data.prepare.input_files import InputError

SHOWN = 5  # bad entries of an input that are listed one by one
HOPELESS = 1000  # entries without a good one among them, after which no more are read
NOUNS = {"jsonl": "lines", "parquet": "rows", "text": "files"}


class Document(NamedTuple):
    """A text, or tokens that another program made; `where` is its place, for messages."""

    content: str | np.ndarray
    source: str
    where: str


@dataclass(frozen=True)
class InputOptions:
    """How inputs are read: the key or column of the text, the source where none is named, what parts packed tokens."""

    text_key: str = "text"
    source: str = "text"
    separator: int | None = None


@dataclass
class Tally:
    """What reading an input has come to. `entries` are lines, rows, files or samples, `position` bytes of its files."""

    name: str
    noun: str
    max_bad: float
    entries: int = 0
    bad: int = 0
    empty: int = 0
    position: int = 0
    examples: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def keeps(self, text: str) -> bool:
        """Whether a text has something in it; counts those that have not."""
        empty = not text or text.isspace()
        self.empty += empty
        return not empty

    def keeps_tokens(self, tokens: np.ndarray) -> bool:
        """Whether there are any; counts where there are none."""
        self.empty += not tokens.size
        return bool(tokens.size)

    def reject(self, where: str, why: str) -> None:
        """Count a bad entry; InputError where there was never a good one."""
        self.bad += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{where}: {why[:200]}")
        if self.bad == self.entries == HOPELESS and self.max_bad < 1:
            raise InputError(f"{self.bad_entries()}\nnot one of the first {HOPELESS} is good; correct the input")

    def judge(self, max_bad: float) -> None:
        """InputError where more than this share is bad. It is rounded up: above 0, one bad entry is always allowed."""
        if self.bad > math.ceil(max_bad * self.entries - 1e-9):
            cure = f"--max-bad {max_bad:.6g} allows less; correct the input, or allow more"
            raise InputError(f"{self.bad_entries()}\n{cure}")

    def bad_entries(self) -> str:
        """The bad entries, in words."""
        listed = "".join(f"\n  {example}" for example in self.examples)
        more = f"\n  and {self.bad - len(self.examples)} more" if self.bad > len(self.examples) else ""
        return f"{self.name}: {self.bad} of {self.entries} {self.noun} are bad and left out{listed}{more}"


def in_validation(content: str | np.ndarray, share: float) -> bool:
    """Whether a document is held out: by its content, so that copies of it are on the same side, wherever they are.

    Tokens are placed by their own values, so that a text and its tokens may be on different sides.
    """
    data = content.encode() if isinstance(content, str) else content.astype("<u4").tobytes()
    return xxhash.xxh3_64_intdigest(data) < share * 2**64
