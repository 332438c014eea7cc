"""A row's new tokens as text, as they come: characters that are complete, up to a stop string.

A token may end within a character, and a tokenizer may write a token otherwise at a text's start: so tokens are decoded
with those before them, from the last place at which the text was complete. Only these are decoded again, whatever the
length. A stop string ends the text before it, wherever tokens divide it; the end of the text that could begin one is
held until it is known. The tokenizer is a function from tokens to text: this file knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is decoded to
LONGEST_CHARACTER = 16  # tokens; what is not complete after as many is no character

Decode = Callable[[Sequence[int]], str]


@dataclass
class TextOfRow:
    """The text that follows a prompt: `most` tokens, or up to one of `ends` (tokens), or before one of `stops`.

    `before` are the prompt's last tokens, which the first new one may continue a word of.
    """

    decode: Decode
    most: int
    before: Sequence[int] = ()
    stops: Sequence[str] = ()
    ends: Sequence[int | None] = ()
    text: str = field(default="", init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    ended: Literal["", "end", "stop", "most"] = field(default="", init=False)

    def __post_init__(self) -> None:
        self._recent = list(self.before[-LONGEST_CHARACTER:])
        self._complete = len(self._recent)  # of these tokens, those that are in the text, or in the prompt's
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain with this token and was not before; nothing once the text has ended."""
        if self.ended:
            return ""
        if token in self.ends:
            self.ended = "end"
            return self._released(self._new_text())
        self.tokens.append(token)
        self._recent.append(token)
        if len(self.tokens) == self.most:
            self.ended = "most"
        new = self._new_text()
        if new.endswith(INCOMPLETE) and not self.ended and len(self._recent) - self._complete < LONGEST_CHARACTER:
            return ""
        self._recent = self._recent[self._complete :]
        self._complete = len(self._recent)
        return self._released(new)

    def _new_text(self) -> str:
        if self._complete == len(self._recent):
            return ""
        return self.decode(self._recent)[len(self.decode(self._recent[: self._complete])) :]

    def _released(self, new: str) -> str:
        """Up to a stop string, or to what may become one where the text continues."""
        held = self._held + new
        certain = len(held)
        if places := [place for stop in self.stops if (place := held.find(stop)) >= 0]:
            certain, self.ended = min(places), "stop"
        elif not self.ended:
            begun = (n for stop in self.stops for n in range(1, len(stop)) if held.endswith(stop[:n]))
            certain -= max(begun, default=0)
        self._held = held[certain:]
        self.text += held[:certain]
        return held[:certain]


def write(texts: Sequence[TextOfRow], steps: Iterator[list[int]], heard: Callable[[int, str], object]) -> None:
    """Add a token to each row at every step until all have ended; `heard` gets the row and the text that is new."""
    while not all(text.ended for text in texts):
        for row, (text, token) in enumerate(zip(texts, next(steps), strict=True)):
            if new := text.add(token):
                heard(row, new)
