"""Errors that a user can mend; their messages name a cure.

A wrong configuration is reported with all its problems at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration: the key, and a message with the fault and a cure."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}  {self.message}"


class Unusable(ValueError):
    """Raised for a user's mistake; the message has the reason and a cure. Commands exit with code 2."""


class ConfigError(Unusable):
    """Raised for a configuration that can't run. Its text lists all problems, one on each line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        width = max(len(p.key) for p in self.problems)
        indent = "\n" + " " * (width + 4)
        lines = [f"  {p.key:<{width}}  {p.message.replace(chr(10), indent)}" for p in self.problems]
        count = len(self.problems)
        super().__init__("\n".join([f"{count} problem{'s' * (count > 1)} in the configuration", *lines]))


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
