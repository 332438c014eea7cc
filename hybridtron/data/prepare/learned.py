"""The learned characters of a JSON line: only they count in the loss, but the model reads the full text.

The option `--learn` selects how a JSON line marks the learned characters:

    spans        {"text": "2 + 2 = 4.", "spans": [[8, 9]]}
                 learned: the characters text[8:9]
    completion   {"prompt": "2 + 2 =", "completion": " 4"}
                 learned: the completion
    messages     {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
                 learned: the assistant's spans in the text that the chat template renders

A prompt and its completion are tokenized separately, because at inference the model gets only the prompt's tokens. A
faulty line raises ValueError with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hybridtron.data.prepare.documents import InputOptions, Learned

NOTHING_LEARNED = "has nothing to learn"


def text_of(record: dict[str, Any], key: str) -> str:
    """Return a key's value; raise ValueError if it is missing or not a string."""
    if key not in record:
        raise ValueError(f"has no key {key!r}")
    if not isinstance(text := record[key], str):
        raise ValueError(f"{key!r} is a {type(text).__name__}, not a string")
    return text


def by_spans(record: dict[str, Any], reading: InputOptions) -> tuple[str, Learned]:
    """Return a text and its learned spans, sorted. Spans are (begin, end) indices of Unicode code points."""
    text = text_of(record, reading.text_key)
    listed_spans = record.get("spans")
    if not isinstance(listed_spans, list):
        raise ValueError("has no 'spans', a list of [first, end]")
    for span in listed_spans:
        if not (isinstance(span, list) and [type(place) for place in span] == [int, int]):
            raise ValueError(f"'spans' has {span!r}, which is not [first, end], two whole numbers")
        if not 0 <= span[0] < span[1] <= len(text):
            raise ValueError(f"'spans' has {span}, which is not part of a text of {len(text)} characters")
    spans = sorted((first, end) for first, end in listed_spans)
    for before, after in itertools.pairwise(spans):
        if after[0] < before[1]:
            raise ValueError(f"'spans' has {list(before)} and {list(after)}, which overlap")
    if text and not spans:
        raise ValueError(f"{NOTHING_LEARNED}: 'spans' is empty")
    return text, Learned(tuple(spans))


def by_completion(record: dict[str, Any], reading: InputOptions) -> tuple[str, Learned]:
    """Return a prompt and its completion as one text, in which the completion is learned. The prompt may be empty."""
    prompt = text_of(record, "prompt")
    completion = text_of(record, "completion")
    if not completion:
        raise ValueError(f"{NOTHING_LEARNED}: 'completion' is empty")
    return prompt + completion, Learned(((len(prompt), len(prompt) + len(completion)),), apart=True)


def by_messages(record: dict[str, Any], reading: InputOptions) -> tuple[str, Learned]:
    """Return a conversation's text, in which the assistant's spans are learned."""
    assert reading.chat is not None
    text, spans = reading.chat.conversation(record.get("messages"), record.get("tools"))
    if not spans:
        raise ValueError(f"{NOTHING_LEARNED}: the assistant says nothing in 'messages'")
    return text, Learned(spans, special=True)


FORMS: dict[str, Callable[[dict[str, Any], InputOptions], tuple[str, Learned]]] = {
    "spans": by_spans,
    "completion": by_completion,
    "messages": by_messages,
}
