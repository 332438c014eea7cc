"""Pre-tokenizers: each splits as its name says, and a tokenizer.json gives the name back."""

from __future__ import annotations

import json

import pytest

from hybridtron.data.pre_tokenizers import DEFAULT, PATTERNS, known_name, pre_tokenizer
from hybridtron.data.prepare.embedded import train_tokenizer

NUMBERS = {"gpt-2": ["12345"], "llama-bpe": ["123", "45"], "qwen2": ["1", "2", "3", "4", "5"]}


@pytest.mark.parametrize("name", PATTERNS)
def test_pre_tokenizers_split_numbers_differently(name: str) -> None:
    pieces = [piece for piece, _ in pre_tokenizer(name).pre_tokenize_str("12345")]
    assert pieces == NUMBERS[name]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_trained_tokenizer_gives_the_name_back(name: str) -> None:
    tokenizer = train_tokenizer(["The year 2024 isn't 1999.\n\n"] * 5, 300, name)
    assert known_name(tokenizer.to_str()) == name
    text = "It's 31415 in\n\nall: größe 猫"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_default_is_what_tokenizers_had_before_there_was_a_choice() -> None:
    stored = json.loads(train_tokenizer(["text"], 300).to_str())
    assert stored["pre_tokenizer"]["type"] == "ByteLevel"
    assert known_name(json.dumps(stored)) == DEFAULT == "gpt-2"
    del stored["pre_tokenizer"]["use_regex"]  # as in older files
    assert known_name(json.dumps(stored)) == DEFAULT
    stored["pre_tokenizer"]["add_prefix_space"] = True
    assert known_name(json.dumps(stored)) is None


@pytest.mark.parametrize("stored", ["{}", "[]", "no JSON", '{"pre_tokenizer": {"type": "Whitespace"}}'])
def test_other_pre_tokenizers_have_no_name(stored: str) -> None:
    assert known_name(stored) is None
