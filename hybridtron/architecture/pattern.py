"""The layer pattern: one letter for each residual sub-layer, such as `(M-W-)*6`.

    letter     any one character except whitespace and ( ) * |
    ( ... )    a group
    *N         repeats the letter or group before it N times
    |          a boundary between pipeline stages, also inside a group

Whitespace is ignored. This file does not know the letters' meanings: a recipe defines them under `model.layers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

MAX_LETTERS = 10_000
RESERVED = "()*|"

_REPEAT = re.compile(r"\*\s*([0-9]+)")

_Symbol = tuple[str, int]  # a letter or a bar, and its position in the text


@dataclass(frozen=True)
class Pattern:
    """The letters in order, and the number of letters in each stage (one stage if there is no bar)."""

    letters: tuple[str, ...]
    stages: tuple[int, ...]


class PatternError(ValueError):
    """Raised for a pattern that can't be parsed. The message ends with the pattern and a caret under the error."""

    def __init__(self, message: str, text: str, position: int) -> None:
        self.position = position
        shown = re.sub(r"\s", " ", text)
        super().__init__(f"{message}\n{shown}\n{' ' * position}^")


def parse(text: str, known: Collection[str]) -> Pattern:
    """Expand a pattern whose letters must all be in `known`. Raises PatternError if it can't be parsed."""
    if not text.strip():
        raise PatternError("the pattern is empty", text, 0)
    letters: list[str] = []
    stages = [0]
    bar = 0
    for symbol, position in _expanded(text, known):
        if symbol != "|":
            letters.append(symbol)
            stages[-1] += 1
            continue
        bar = position
        if not stages[-1]:
            raise PatternError("no letter stands before this stage border", text, position)
        stages.append(0)
    if not stages[-1]:
        raise PatternError("no letter stands after this stage border", text, bar)
    return Pattern(tuple(letters), tuple(stages))


def _expanded(text: str, known: Collection[str]) -> list[_Symbol]:
    """Return the letters and bars of the text, with groups and repeats expanded."""
    groups: list[list[_Symbol]] = [[]]  # the open groups, the innermost last
    opened: list[int] = []  # the positions of their opening parentheses
    last: list[_Symbol] = []  # the symbols that a following *N repeats
    at = 0
    while at < len(text):
        symbol = text[at]
        here = at
        at += 1
        if symbol.isspace():
            continue
        if symbol == "(":
            groups.append([])
            opened.append(here)
            last = []
        elif symbol == ")":
            if not opened:
                raise PatternError("this parenthesis closes nothing", text, here)
            opened.pop()
            last = groups.pop()
            if not last:
                raise PatternError("this group is empty", text, here)
            groups[-1] += last
        elif symbol == "*":
            repeats, at = _repeats(text, here, last)
            groups[-1] += last * (repeats - 1)
            last = []
        else:
            if symbol != "|" and symbol not in known:
                _unknown(text, here, known)
            groups[-1].append((symbol, here))
            last = [] if symbol == "|" else [(symbol, here)]
        if sum(map(len, groups)) > MAX_LETTERS:
            raise PatternError(f"the pattern has more than {MAX_LETTERS} letters from here on", text, here)
    if opened:
        raise PatternError("this parenthesis is never closed", text, opened[-1])
    return groups[0]


def _repeats(text: str, here: int, repeated: list[_Symbol]) -> tuple[int, int]:
    """Return the repeat count of the star at `here`, and the position after its number."""
    match = _REPEAT.match(text, here)
    if match is None:
        raise PatternError("'*' needs a number after it, as in M*3; it can't be a letter", text, here)
    if not repeated:
        raise PatternError("nothing to repeat: '*N' stands after a letter or a group", text, here)
    digits = match[1].lstrip("0")
    if not digits:
        raise PatternError("repeats zero times: use at least 1, or leave it out", text, here)
    if len(digits) > len(str(MAX_LETTERS)) or int(digits) * len(repeated) > MAX_LETTERS:
        raise PatternError(f"repeats to more than {MAX_LETTERS} letters", text, here)
    return int(digits), match.end()


def _unknown(text: str, here: int, known: Collection[str]) -> NoReturn:
    if known:
        letters = f"have: {' '.join(known)}"
    else:
        letters = "none are defined"
    raise PatternError(f"unknown letter {text[here]!r}; {letters}", text, here)
