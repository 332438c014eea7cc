"""The layer pattern: one letter for each residual sub-layer, such as `(M-W-)*6`.

    letter     any one character except whitespace and ( ) * |
    ( ... )    a group
    *N         repeats the letter or group before it N times
    |          a boundary between pipeline stages; it may be inside a group

Whitespace is ignored. `(M-W-)*6|M` has 25 letters in two stages. A recipe, the YAML file of a run, defines each letter
under `model.layers` by its mixer: attention, a recurrence or an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

MAX_LETTERS = 10_000
RESERVED = "()*|"

_REPEAT = re.compile(r"\*\s*([0-9]+)")

_Symbol = tuple[str, int]  # a letter or "|", and its position in the text


@dataclass(frozen=True)
class Pattern:
    """The letters in order, and the number of letters in each stage; a pattern without "|" has one stage."""

    letters: tuple[str, ...]
    stages: tuple[int, ...]


class PatternError(ValueError):
    """Raised for a pattern that can't be parsed. The message ends with the pattern, and a caret under the error."""

    def __init__(self, message: str, text: str, position: int) -> None:
        self.position = position
        shown = re.sub(r"\s", " ", text)
        super().__init__(f"{message}\n{shown}\n{' ' * position}^")


def parse(text: str, known: Collection[str]) -> Pattern:
    """Parse and expand a pattern. Raises PatternError if it is malformed, or has a letter that is not in `known`.

    `known` are the letters that the recipe defines.
    """
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
            raise PatternError("no letter stands before this stage boundary: remove the boundary", text, position)
        stages.append(0)
    if not stages[-1]:
        raise PatternError("no letter stands after this stage boundary: remove the boundary", text, bar)
    return Pattern(tuple(letters), tuple(stages))


def _expanded(text: str, known: Collection[str]) -> list[_Symbol]:
    """Return the letters and stage boundaries of the text, with groups and repeats expanded."""
    groups: list[list[_Symbol]] = [[]]  # first the symbols outside groups, then the symbols of each open group
    opened: list[int] = []  # positions of the open groups' parentheses
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
                raise PatternError("this parenthesis closes no group: remove it, or open a group with '('", text, here)
            opened.pop()
            last = groups.pop()
            if not last:
                raise PatternError("this group is empty: put letters into it, or remove it", text, here)
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
            raise PatternError(f"the pattern has more than {MAX_LETTERS} letters: shorten it", text, here)
    if opened:
        raise PatternError("this parenthesis is never closed: add ')'", text, opened[-1])
    return groups[0]


def _repeats(text: str, here: int, repeated: list[_Symbol]) -> tuple[int, int]:
    """Return the repeat count of the star at `here`, and the position after its number."""
    match = _REPEAT.match(text, here)
    if match is None:
        raise PatternError("'*' needs a number after it, as in M*3; it can't be a letter", text, here)
    if not repeated:
        raise PatternError("'*N' has nothing to repeat: put it after a letter or a group", text, here)
    digits = match[1].lstrip("0")
    if not digits:
        raise PatternError("'*0' repeats zero times: use a number of at least 1, or leave the letters out", text, here)
    if len(digits) > len(str(MAX_LETTERS)) or int(digits) * len(repeated) > MAX_LETTERS:
        raise PatternError(f"this repeat gives more than {MAX_LETTERS} letters: use a smaller number", text, here)
    return int(digits), match.end()


def _unknown(text: str, here: int, known: Collection[str]) -> NoReturn:
    if known:
        letters = f"model.layers defines {' '.join(known)}"
    else:
        letters = "model.layers defines no letters"
    raise PatternError(f"unknown letter {text[here]!r}; {letters}", text, here)
