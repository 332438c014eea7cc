"""Renders conversations as text with a tokenizer's chat template, and finds the assistant's spans in the text.

Only the assistant's spans count in the loss. A template is an untrusted Jinja program, so it runs in Jinja's sandbox,
in a process with limited time and memory. If the template marks the assistant's text with {% generation %}, the spans
are the marked text. Otherwise the span for the assistant's message i is found with two further renderings:

    the span begins at the length of  render(messages[:i], add_generation_prompt=True)
    the span ends at the length of    render(messages[:i + 1])

Both renderings must be prefixes of the full text. A template is refused if it renders a message differently when other
messages follow, because its renderings are then not prefixes. The text does not depend on the date, because templates
do not get the function `strftime_now`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridtron.data.prepare.template_process import BEGIN, END, MAX_LOST, template_process
from hybridtron.data.workers import WorkerEnded

Spans = tuple[tuple[int, int], ...]
CONTENT_MARK = "\ufdd2"  # a noncharacter of Unicode, which normal text does not contain
ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    tokens: (name, text) for each special token that the template may use; a name is `bos_token`, for example
    special: special tokens' texts, which a message must not contain
    """

    text: str
    tokens: tuple[tuple[str, str], ...]
    special: frozenset[str]

    def fault(self) -> str | None:
        """Return why the template can't be used; None if it can be used.

        A template can't be used if it does not parse, or if it exceeds its limits on a trial with two short messages.
        """
        return template_process(self.text, self.tokens).fault()

    def stored(self) -> str:
        """Return the template and its tokens as JSON, which manifests and checkpoints store."""
        return json.dumps({"template": self.text, "tokens": dict(self.tokens)})

    @staticmethod
    def of_stored(text: str) -> ChatTemplate:
        """Return the template from the JSON that `stored` returns."""
        values = json.loads(text)
        return ChatTemplate(values["template"], tuple(values["tokens"].items()), frozenset())

    def prompt(self, messages: list[dict[str, Any]], continued: bool = False) -> str:
        """Return the prompt from which a model generates the assistant's next message.

        continued: True to return the prompt from which a model continues the last message
        """
        if not continued:
            return self._written(messages, True)
        # Append a mark to the last message, render, and cut the text at the mark.
        *before, last = messages
        text = self._written([*before, {**last, "content": f"{last['content']}{CONTENT_MARK} "}])
        before_it, marker, behind = text.rpartition(CONTENT_MARK)
        if not marker:
            raise ValueError("the chat template does not write the last message, which is to be continued")
        # If the space after the mark is missing, the template strips messages, so spaces before the mark are removed.
        if behind.startswith(" "):
            return before_it
        return before_it.rstrip()

    def question(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt for the next answer; raise ValueError if a message is malformed or has a special token."""
        _check(messages, self.special)
        return self.prompt(messages)

    def behind_answer(self, messages: list[dict[str, Any]]) -> str:
        """Return the text that the template writes after the content of the assistant's next message."""
        answered = [*messages, {"role": ASSISTANT, "content": CONTENT_MARK}]
        return self._written(answered).rpartition(CONTENT_MARK)[2]

    def conversation(self, messages: Any, tools: Any = None) -> tuple[str, Spans]:
        """Return a conversation's text and the assistant's spans; raise ValueError if the conversation is invalid.

        Raises WorkerEnded if the template has already exceeded its limits MAX_LOST times.
        """
        _check(messages, self.special)
        if (lost := template_process(self.text, self.tokens).lost) >= MAX_LOST:
            raise WorkerEnded(f"the chat template exceeded its limits in {lost} conversations; correct the template")
        indices = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [cut for index in indices for cut in ((index, True), (index + 1, False))]
        whole, ends = self._render(messages, tools, cuts=turns)
        if BEGIN in whole:
            text, spans = _marked(whole)
        else:
            text = whole
            spans = _turns(indices, ends)
        eos = dict(self.tokens).get("eos_token")
        if eos and text.rstrip().endswith(eos):
            text = text.rstrip()  # so that the document's last token is eos
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
            raise ValueError(f"the chat template can't render the conversation: {error}") from error


def _turns(indices: list[int], ends: list[int | None]) -> Spans:
    """Return a span for each of the assistant's messages.

    indices: indices of the assistant's messages in the conversation
    ends: for each of these messages, the length of the prompt for the message, and the length of the rendering up to
        the message's end. A length is None if its rendering is not a prefix of the full text.
    """
    spans = []
    for index, before, after in zip(indices, ends[::2], ends[1::2], strict=True):
        if before is None or after is None or before > after:
            why = f"the chat template renders message {index} differently when other messages follow"
            raise ValueError(f"{why}; mark the assistant's text with {{% generation %}} in the template")
        spans.append((before, after))
    return tuple(spans)


def _check(messages: Any, special: frozenset[str]) -> None:
    """Raise ValueError if messages are malformed, or contain a special token, which could end the message early."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no 'messages' that is a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {index} has no 'role'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {index} has no 'content' that is a string")
        spelled = sorted(token for token in {*special, BEGIN, END} if content and token in content)
        if spelled:
            raise ValueError(f"message {index} spells the special token {spelled[0]!r}")


def _marked(whole: str) -> tuple[str, Spans]:
    """Return the text without {% generation %} marks, and the spans that were marked."""
    pieces = re.split(f"[{BEGIN}{END}]", whole)
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    return "".join(pieces), tuple(zip(ends[:-1:2], ends[1::2], strict=True))
