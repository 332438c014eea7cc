"""Decode generated tokens to text one by one: complete characters only, up to a stop string.

A token may end within a character, and a tokenizer may decode a token differently at a text's start. So a new token is
decoded together with the tokens that were decoded last, and the text of these last tokens is cut off again. A token's
cost does not grow with the text's length.

The text ends before a stop string, no matter how tokens divide the stop string. If the text so far ends with the
beginning of a stop string, this beginning is withheld until later tokens show whether the stop string continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode an incomplete character to this character
LONGEST_CHARACTER = 16  # tokens; a character that is still incomplete after this number of tokens is invalid

Decode = Callable[[Sequence[int]], str]  # a tokenizer's function from tokens to text


@dataclass
class Detokenizer:
    """Incremental decoder for one generated text.

    `before` are the prompt's last tokens, because the first new token may continue the prompt's last word. `text` and
    `tokens` are the results so far. `ended` is empty until the text ends, and then has the reason:

        end     a token in `ends` was added
        stop    the text contained a string in `stops`
        most    `max_tokens` tokens were added
    """

    decode: Decode
    max_tokens: int
    before: Sequence[int] = ()
    stops: Sequence[str] = ()
    ends: Sequence[int | None] = ()
    text: str = field(default="", init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    ended: Literal["", "end", "stop", "most"] = field(default="", init=False)

    def __post_init__(self) -> None:
        self._recent = list(self.before[-LONGEST_CHARACTER:])
        # number of tokens at the start of _recent whose text is already in `text`, in `_undecided` or in the prompt
        self._complete = len(self._recent)
        self._undecided = ""

    def add(self, token: int) -> str:
        """Add a token; return the new text that no later token can change. After the end, the new text is empty."""
        if self.ended:
            return ""
        if token in self.ends:
            self.ended = "end"
            return self._released(self._new_text())
        self.tokens.append(token)
        self._recent.append(token)
        if len(self.tokens) == self.max_tokens:
            self.ended = "most"
        new = self._new_text()
        if new.endswith(INCOMPLETE) and not self.ended and len(self._recent) - self._complete < LONGEST_CHARACTER:
            return ""
        self._recent = self._recent[self._complete :]
        self._complete = len(self._recent)
        return self._released(new)

    def _new_text(self) -> str:
        """Return the text of the tokens in `_recent` after the first `_complete` tokens."""
        if self._complete == len(self._recent):
            return ""
        return self.decode(self._recent)[len(self.decode(self._recent[: self._complete])) :]

    def _released(self, new: str) -> str:
        """Add `new` to `_undecided`; remove and return the text in `_undecided` that is certain to stay.

        Text before a stop string is certain. Without a stop string, an end that may be the beginning of a stop string
        is not certain, unless the text has ended; all other text is certain.
        """
        pending = self._undecided + new
        certain = len(pending)
        if starts := [start for stop in self.stops if (start := pending.find(stop)) >= 0]:
            certain = min(starts)
            self.ended = "stop"
        elif not self.ended:
            partial_stops = (n for stop in self.stops for n in range(1, len(stop)) if pending.endswith(stop[:n]))
            certain -= max(partial_stops, default=0)
        self._undecided = pending[certain:]
        self.text += pending[:certain]
        return pending[:certain]


def stream_texts(
    texts: Sequence[Detokenizer], steps: Iterator[list[int]], on_text: Callable[[int, str], object]
) -> None:
    """At each step, add the next token to every text, until all texts have ended.

    If a text grows, `on_text` is called with the text's index and the new part.
    """
    while not all(text.ended for text in texts):
        for row, (text, token) in enumerate(zip(texts, next(steps), strict=True)):
            if new := text.add(token):
                on_text(row, new)
