"""Conversations -> text by a tokenizer's chat template, with the spans that the assistant wrote.

A template is a Jinja program from elsewhere. It runs in Jinja's sandbox, in a process with limited time and memory. If
it marks the assistant's words by {% generation %}, these are learned. Otherwise the text that it writes for an
assistant's message, beyond the prompt, is learned:

    render(messages[:i], add_generation_prompt=True) | learned | the end of render(messages[:i + 1])

Both renderings must be prefixes of the full text: a template that writes a turn differently when others follow is
refused. The text does not depend on the day, because `strftime_now`, which some templates look for, is not defined.
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
    """A chat template.

    tokens: special tokens that the template may use, by name (`bos_token` and the like)
    special: special tokens that a message must not contain
    """

    text: str
    tokens: tuple[tuple[str, str], ...]
    special: frozenset[str]

    def fault(self) -> str | None:
        """Return why the template can't be used, as a predicate for a message; None if it can.

        A template is faulty if it does not parse, or exceeds its limits on two short messages.
        """
        return template_process(self.text, self.tokens).fault()

    def stored(self) -> str:
        """Return the template and its tokens as JSON, for folders and checkpoints."""
        return json.dumps({"template": self.text, "tokens": dict(self.tokens)})

    @staticmethod
    def of_stored(text: str) -> ChatTemplate:
        """Read the JSON that `stored` returns."""
        values = json.loads(text)
        return ChatTemplate(values["template"], tuple(values["tokens"].items()), frozenset())

    def prompt(self, messages: list[dict[str, Any]], continued: bool = False) -> str:
        """Return the text before the next answer or, with `continued`, before the rest of the last message."""
        if not continued:
            return self._written(messages, True)
        *before, last = messages
        text = self._written([*before, {**last, "content": f"{last['content']}{HERE} "}])
        before_it, marker, behind = text.rpartition(HERE)
        if not marker:
            raise ValueError("the chat template does not write the last message, which is to be continued")
        # the template trims messages
        if behind.startswith(" "):
            return before_it
        return before_it.rstrip()

    def question(self, messages: list[dict[str, Any]]) -> str:
        """Return the text before the next answer; raise ValueError also if a message contains a special token."""
        _check(messages, self.special)
        return self.prompt(messages)

    def behind_answer(self, messages: list[dict[str, Any]]) -> str:
        """Return the text that the template writes between the next answer and another message."""
        answered = [*messages, {"role": ASSISTANT, "content": HERE}]
        return self._written(answered).rpartition(HERE)[2]

    def conversation(self, messages: Any, tools: Any = None) -> tuple[str, Spans]:
        """Return a conversation's text, and the spans that the assistant wrote; raise ValueError if it is invalid.

        Raises WorkerEnded once the template has exceeded its limits MOST_LOST times.
        """
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
            text = text.rstrip()  # a document ends with eos
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
    """Return the span that the template writes for each message of the assistant, beyond its prompt.

    ends: the lengths of the text before and after each message; None where that text is not a prefix
    """
    spans = []
    for place, before, after in zip(places, ends[::2], ends[1::2], strict=True):
        if before is None or after is None or before > after:
            why = f"the chat template writes message {place} otherwise where others follow it"
            raise ValueError(f"{why}; one that marks what is learned by {{% generation %}} works")
        spans.append((before, after))
    return tuple(spans)


def _check(messages: Any, special: frozenset[str]) -> None:
    """Raise ValueError unless these are messages without special tokens, which could end a turn."""
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
    """Return the text without marks, and the spans between them."""
    pieces = re.split(f"[{BEGIN}{END}]", whole)
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    return "".join(pieces), tuple(zip(ends[:-1:2], ends[1::2], strict=True))
