"""Errors that a user can mend; their messages name a cure.

A wrong configuration is reported with all its problems at once. Every error has a code for the kind of its fault, which
stays the same when a message is reworded: programs and tests compare codes, and only people read messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

Code = Literal[
    "changed",
    "conflict",
    "does-not-fit",
    "duplicate",
    "exists",
    "in-use",
    "malformed",
    "mismatch",
    "misplaced",
    "missing",
    "needs-other-key",
    "no-effect",
    "no-file",
    "not-divisible",
    "not-installed",
    "out-of-range",
    "reads-ahead",
    "secret",
    "unavailable",
    "unknown-name",
    "unreadable",
    "unsupported",
    "wrong-type",
]

MEANINGS: Mapping[Code, str] = {
    "changed": "a value differs from the one that is recorded for this run, checkpoint or file",
    "conflict": "two values are allowed by themselves, but not together",
    "does-not-fit": "data, rows, time or machines are too few or too many for it",
    "duplicate": "two entries have the same name",
    "exists": "the output is there already, from something else",
    "in-use": "another process uses it",
    "malformed": "a text does not have the form that it must have",
    "mismatch": "data, a tokenizer or weights belong to another model",
    "misplaced": "it is allowed elsewhere, but not at this place",
    "missing": "a required value is not set, or empty",
    "needs-other-key": "it works only with another key set, which the message names",
    "no-effect": "nothing would read it, as other keys are set",
    "no-file": "there is no such file, folder, run or checkpoint",
    "not-divisible": "a size must divide another, or be a multiple of it",
    "not-installed": "a package is not installed",
    "out-of-range": "a number is too small or too large",
    "reads-ahead": "losses would depend on tokens that come later",
    "secret": "a password or token would be written to a file",
    "unavailable": "this machine or cluster lacks it, or does not answer",
    "unknown-name": "there is no key, option, choice, task or weight of this name",
    "unreadable": "a file or folder is damaged, of another kind, or can't be opened",
    "unsupported": "it is not implemented for this case",
    "wrong-type": "a value has another type or number of entries than the key",
}


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration: the key, the kind of fault, and a message with the fault and a cure.

    Key and code together identify the rule that was broken.
    """

    key: str
    code: Code
    message: str

    def below(self, section: str) -> Problem:
        """Return the problem with its key below a section's."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        return f"{self.key}  {self.message}"


class Unusable(ValueError):
    """Raised for a user's mistake; the message has the reason and a cure. Commands exit with code 2."""

    def __init__(self, message: str, *, code: Code) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), code=self.code), self.args  # worker processes send it to their parent


class ConfigError(Unusable):
    """Raised for a configuration that can't run. Its text lists all problems, one on each line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        width = max(len(p.key) for p in self.problems)
        indent = "\n" + " " * (width + 4)
        lines = [f"  {p.key:<{width}}  {p.message.replace(chr(10), indent)}" for p in self.problems]
        count = len(self.problems)
        text = "\n".join([f"{count} problem{'s' * (count > 1)} in the configuration", *lines])
        super().__init__(text, code=self.problems[0].code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ` (did you mean width?)` for the closest known name, or an empty string if none is close."""
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f" (did you mean {close[0]}?)"
    return ""


def choice(values: list[int]) -> str:
    """Format values as `1, 2 or 4`."""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
