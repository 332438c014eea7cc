"""Conversations -> text by the chat template of a tokenizer, and which of it is the assistant's.

A template is a Jinja program, and comes from elsewhere: it runs in Jinja's sandbox, in a process of its own, which has
bounds of time and memory. Where it marks the words of the assistant by {% generation %}, these are learned. Where it
does not, what it writes for a message beyond its prompt is:

    render(messages[:i], add_generation_prompt=True) | learned | the end of render(messages[:i + 1])

Both must be beginnings of the whole text: a template that writes a turn otherwise where others follow it is refused.
What it writes does not depend on the day: `strftime_now`, which some templates look for, is not defined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridtron.data.prepare.template_process import BEGIN, END, MOST_LOST, template_process
from hybridtron.data.workers import WorkerEnded

Spans = tuple[tuple[int, int], ...]
HERE = "\ufdd2"  # a noncharacter of Unicode, which no text has
ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the tokens that it may name (`bos_token` and the like), and those that no message may spell."""

    text: str
    tokens: tuple[tuple[str, str], ...]
    special: frozenset[str]

    def fault(self) -> str | None:
        """Say, behind its name, why it is no template, or one that takes too much; None where it is one."""
        return template_process(self.text, self.tokens).fault()

    def stored(self) -> str:
        """As folders and checkpoints keep it: the template and what it may name."""
        return json.dumps({"template": self.text, "tokens": dict(self.tokens)})

    @staticmethod
    def of_stored(text: str) -> ChatTemplate:
        """What `stored` wrote."""
        values = json.loads(text)
        return ChatTemplate(values["template"], tuple(values["tokens"].items()), frozenset())

    def prompt(self, messages: list[dict[str, Any]], continued: bool = False) -> str:
        """What comes before the next answer; `continued`: before the rest of the last message."""
        if not continued:
            return self._written(messages, True)
        *before, last = messages
        text = self._written([*before, {**last, "content": f"{last['content']}{HERE} "}])
        before_it, found, behind = text.rpartition(HERE)
        if not found:
            raise ValueError("the chat template does not write the last message, which is to be continued")
        return before_it if behind.startswith(" ") else before_it.rstrip()  # as it trims the others

    def question(self, messages: list[dict[str, Any]]) -> str:
        """What comes before the next answer; ValueError where a message spells a special token, too."""
        _check(messages, self.special)
        return self.prompt(messages)

    def behind_answer(self, messages: list[dict[str, Any]]) -> str:
        """What the template writes behind the next answer, before another message."""
        answered = [*messages, {"role": ASSISTANT, "content": HERE}]
        return self._written(answered).rpartition(HERE)[2]

    def conversation(self, messages: Any, tools: Any = None) -> tuple[str, Spans]:
        """The text of a conversation, and the spans that the assistant wrote; ValueError says what is wrong with it."""
        _check(messages, self.special)
        if (lost := template_process(self.text, self.tokens).lost) >= MOST_LOST:
            raise WorkerEnded(f"{lost} conversations took the chat template more than it may; correct it")
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [cut for place in places for cut in ((place, True), (place + 1, False))]
        whole, ends = self._render(messages, tools, cuts=turns)
        if BEGIN in whole:
            text, spans = _marked(whole)
        else:
            text = whole
            spans = _turns(places, ends)
        eos = dict(self.tokens).get("eos_token")
        if eos and text.rstrip().endswith(eos):
            text = text.rstrip()  # it ends there, as every document does
        clipped = ((first, min(end, len(text))) for first, end in spans)
        return text, tuple(span for span in clipped if span[0] < span[1])

    def _written(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return _marked(self._render(messages, None, prompt)[0])[0]

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False, cuts: Sequence[tuple[int, bool]] = ()
    ) -> tuple[str, list[int | None]]:
        try:
            return template_process(self.text, self.tokens).rendered(messages, tools, prompt, cuts)
        except ValueError as error:
            raise ValueError(f"the chat template does not take it: {error}") from error


def _turns(places: list[int], ends: list[int | None]) -> Spans:
    """Find what is written for each message of the assistant, beyond its prompt."""
    spans = []
    for place, before, after in zip(places, ends[::2], ends[1::2], strict=True):
        if before is None or after is None or before > after:
            why = f"the chat template writes message {place} otherwise where others follow it"
            raise ValueError(f"{why}; one that marks what is learned by {{% generation %}} works")
        spans.append((before, after))
    return tuple(spans)


def _check(messages: Any, special: frozenset[str]) -> None:
    """ValueError where these are no messages, or one spells a special token, which could end its turn."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no 'messages', a list of at least one")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {place} has no 'role'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {place} has no 'content' that is a string")
        spelled = sorted(token for token in {*special, BEGIN, END} if content and token in content)
        if spelled:
            raise ValueError(f"message {place} spells the special token {spelled[0]!r}")


def _marked(whole: str) -> tuple[str, Spans]:
    """The text without marks, and what is between them."""
    pieces = re.split(f"[{BEGIN}{END}]", whole)
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    return "".join(pieces), tuple(zip(ends[:-1:2], ends[1::2], strict=True))
