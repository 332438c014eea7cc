"""Errors that a user can mend; their messages name a cure.

A wrong configuration is reported with all its problems at once. Every error has a code for the kind of fault. Rewording
a message does not change the code, so programs and tests compare codes, not messages.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn

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
    "does-not-fit": "data, rows, time or machines are too few or too many",
    "duplicate": "two entries have the same name",
    "exists": "the output path already exists, with other content",
    "in-use": "another process uses the file, folder or run",
    "malformed": "a text does not have the form that it must have",
    "mismatch": "data, a tokenizer or weights belong to another model",
    "misplaced": "an entry is allowed elsewhere, but not at this position",
    "missing": "a required value is not set, or empty",
    "needs-other-key": "a key works only if another key is set; the message names the other key",
    "no-effect": "a key would have no effect, because of other keys",
    "no-file": "there is no such file, folder, run or checkpoint",
    "not-divisible": "a size must divide another, or be a multiple of it",
    "not-installed": "a package is not installed",
    "out-of-range": "a number is too small or too large",
    "reads-ahead": "losses would depend on tokens that come later",
    "secret": "a password or token would be written to a file",
    "unavailable": "this machine or cluster lacks something that is needed, or a service does not answer",
    "unknown-name": "there is no key, option, choice, task or weight of this name",
    "unreadable": "a file or folder is damaged, of another kind, or can't be opened",
    "unsupported": "an option is not implemented for this case",
    "wrong-type": "a value has another type or number of entries than the key requires",
}


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration: the key, a code for the kind of fault, and a message with the fault and a cure.

    Key and code together identify the rule that was broken.
    """

    key: str
    code: Code
    message: str

    def below(self, section: str) -> Problem:
        """Return the problem with `section` in front of its key: with `optim`, the key `clip` becomes `optim.clip`."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        return f"{self.key}  {self.message}"


class Unusable(ValueError):
    """Raised for a user's mistake; the message has the reason and a cure. Commands exit with code 2."""

    def __init__(self, message: str, *, code: Code) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send exceptions to their parent by pickle. pickle passes arguments by position only, but
        # `code` must be passed by keyword.
        return partial(type(self), code=self.code), self.args, self.__dict__


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, for errors of other libraries in our messages."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


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


class UsageError(SystemExit):
    """Raised for a wrong command line, after a message was printed. It ends the process with exit code 2."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(2)
        self.problem = problem


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, with the option and a code, for each error."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for an error that argparse detects. It names the option that argparse names, if any."""
        fault = sys.exception()
        if isinstance(fault, argparse.ArgumentError):
            self.refuse(fault.argument_name or "", "malformed", message)
        self.refuse("", "malformed", message)

    def refuse(self, option: str, code: Code, message: str) -> NoReturn:
        """Print the usage and a message, and raise UsageError."""
        try:
            super().error(message)
        except SystemExit:
            raise UsageError(Problem(option, code, message)) from None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ` (did you mean width?)` for the closest known name, or an empty string if no name is close."""
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f" (did you mean {close[0]}?)"
    return ""


def choice(values: list[int]) -> str:
    """Format values as `1, 2 or 4`."""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
