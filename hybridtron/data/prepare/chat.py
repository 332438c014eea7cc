"""Conversations -> text by the chat template of a tokenizer, and which of it is the assistant's.

A template is a Jinja program, and comes from elsewhere: it runs in Jinja's sandbox. Where it marks the words of the
assistant by {% generation %}, these are learned. Where it does not, what it writes for a message beyond its prompt is:

    render(messages[:i], add_generation_prompt=True) | learned | the end of render(messages[:i + 1])

Both must be beginnings of the whole text: a template that writes a turn otherwise where others follow it is refused.
What it writes does not depend on the day: `strftime_now`, which some templates look for, is not defined.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Spans = tuple[tuple[int, int], ...]
BEGIN, END, HERE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters of Unicode, which no text has
ASSISTANT = "assistant"


class _Generation(Extension):
    """{% generation %}: puts what is inside between two marks."""

    tags = {"generation"}  # noqa: RUF012 (declared by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (BEGIN, END))
        return [begin, *inside, end]


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the tokens that it may name (`bos_token` and the like), and those that no message may spell."""

    text: str
    tokens: tuple[tuple[str, str], ...]
    special: frozenset[str]

    def fault(self) -> str | None:
        """Why it is no template; None where it is."""
        try:
            _compiled(self.text)
        except TemplateError as error:
            return str(error)
        return None

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
            return _marked(self._render(messages, None, True))[0]
        *before, last = messages
        text = _marked(self._render([*before, {**last, "content": f"{last['content']}{HERE} "}], None))[0]
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
        return _marked(self._render(answered, None))[0].rpartition(HERE)[2]

    def conversation(self, messages: Any, tools: Any = None) -> tuple[str, Spans]:
        """The text of a conversation, and the spans that the assistant wrote; ValueError says what is wrong with it."""
        _check(messages, self.special)
        whole = self._render(messages, tools)
        if BEGIN in whole:
            text, spans = _marked(whole)
        else:
            text, spans = whole, self._turns(whole, messages, tools)
        eos = dict(self.tokens).get("eos_token")
        if eos and text.rstrip().endswith(eos):
            text = text.rstrip()  # it ends there, as every document does
        clipped = ((first, min(end, len(text))) for first, end in spans)
        return text, tuple(span for span in clipped if span[0] < span[1])

    def _turns(self, whole: str, messages: list[dict[str, Any]], tools: Any) -> Spans:
        spans = []
        for place, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, after = self._render(messages[:place], tools, True), self._render(messages[: place + 1], tools)
                if not (whole.startswith(after) and after.startswith(before)):
                    why = f"the chat template writes message {place} otherwise where others follow it"
                    raise ValueError(f"{why}; one that marks what is learned by {{% generation %}} works")
                spans.append((len(before), len(after)))
        return tuple(spans)

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        try:
            return _compiled(self.text).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **dict(self.tokens)
            )
        except Exception as error:  # whatever a program from elsewhere runs into
            raise ValueError(f"the chat template does not take it: {error or type(error).__name__}") from error


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


@lru_cache(maxsize=1)
def _compiled(text: str) -> Template:
    loops = "jinja2.ext.loopcontrols"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loops])
    environment.filters["tojson"] = _as_json
    return environment.from_string(text, globals={"raise_exception": _refuse})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _as_json(value: Any, indent: int | None = None) -> str:
    """As it is spelled in text; Jinja's own filter is for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
