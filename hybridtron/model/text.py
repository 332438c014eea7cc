"""Decode a row's new tokens to text as they come: complete characters only, up to a stop string.

A token may end within a character, and a tokenizer may decode a token differently at a text's start. So tokens are
decoded together with earlier ones, from the last point at which the text was complete; the cost does not grow with the
length. A stop string ends the text before it, however tokens divide it; an end of the text that could begin a stop
string is held back until that is decided. The tokenizer is passed in as a function from tokens to text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders return it for a part of a character
LONGEST_CHARACTER = 16  # tokens; a character that is incomplete after this many is invalid

Decode = Callable[[Sequence[int]], str]


@dataclass
class TextOfRow:
    """Text after a prompt: up to `most` tokens, up to a token in `ends`, or before a string in `stops`.

    `before` are the prompt's last tokens, since the first new token may continue a word of them.
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
        self._complete = len(self._recent)  # number of these tokens that are already in the text or the prompt
        self._held = ""

    def add(self, token: int) -> str:
        """Add a token and return the newly certain text; an empty text after the end."""
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
        """Decode the recent tokens that are not in the text yet."""
        if self._complete == len(self._recent):
            return ""
        return self.decode(self._recent)[len(self.decode(self._recent[: self._complete])) :]

    def _released(self, new: str) -> str:
        """Return the held and new text up to a stop string, or up to a possible beginning of one."""
        pending = self._held + new
        certain = len(pending)
        if places := [place for stop in self.stops if (place := pending.find(stop)) >= 0]:
            certain = min(places)
            self.ended = "stop"
        elif not self.ended:
            partial_stops = (n for stop in self.stops for n in range(1, len(stop)) if pending.endswith(stop[:n]))
            certain -= max(partial_stops, default=0)
        self._held = pending[certain:]
        self.text += pending[:certain]
        return pending[:certain]


def write(texts: Sequence[TextOfRow], steps: Iterator[list[int]], heard: Callable[[int, str], object]) -> None:
    """Add a token to each row at every step until all rows have ended; call `heard` with each row's new text."""
    while not all(text.ended for text in texts):
        for row, (text, token) in enumerate(zip(texts, next(steps), strict=True)):
            if new := text.add(token):
                heard(row, new)
