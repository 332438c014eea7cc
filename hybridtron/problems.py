"""What a person sees when what they named is wrong: of a configuration every problem at once, with what would work."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the key, what is wrong, and what would work."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}  {self.message}"


class Unusable(ValueError):
    """What the user named can't be used; the message says why and what would work. A command's exit code 2."""


class ConfigError(Unusable):
    """A configuration that cannot run. Its text lists all problems, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        width = max(len(p.key) for p in self.problems)
        indent = "\n" + " " * (width + 4)
        lines = [f"  {p.key:<{width}}  {p.message.replace(chr(10), indent)}" for p in self.problems]
        count = len(self.problems)
        super().__init__("\n".join([f"{count} problem{'s' * (count > 1)} in the configuration", *lines]))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """` (did you mean width?)`, or nothing where no known name comes near."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def choice(values: list[int]) -> str:
    """`1, 2 or 4`."""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
