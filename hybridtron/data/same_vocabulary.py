"""Comparison of two tokenizers: do their tokens mean the same to a model? Needs no torch.

Two files for one tokenizer can differ in every byte: another version of the library may write it differently, and
fine-tuning may have added tokens. So their behaviour is compared: the id of every token that both have, the merges, and
the ids for some texts that tokenizers usually split differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer

PROBES = (
    "The quick brown fox, it's 12:45 on 2024-07-01; don't panic!",
    "  two spaces\ttab\n\n  new line \r\n end ",
    "naïve café Ångström ﬁ ２３ ½ e\u0301 ß İ",
    "你好，世界。 привет мир مرحبا こんにちは 안녕",
    "def f(x):\n    return {'a': [x ** 2 != 3.14e-10]}  # 👩‍💻🙂",
    "http://a.b/c?d=e&f=100000000 UPPER lower MiXeD aaaaaaaaaaaaaaaaaaaa",
)


def difference(held: bytes, other: bytes) -> str | None:
    """Return how the tokens in `other` differ from those in `held`, which a model knows; None if they agree.

    Both must be readable. Either may have additional tokens.
    """
    if held == other:
        return None
    return _difference(held, other)


@lru_cache(maxsize=8)
def _difference(held: bytes, other: bytes) -> str | None:
    ours = read_tokenizer(held)
    theirs = read_tokenizer(other)
    ids = ours.get_vocab(with_added_tokens=True)
    their_ids = theirs.get_vocab(with_added_tokens=True)
    return _ids_differ(ids, their_ids) or _merges_differ(ours, theirs) or _texts_differ(ours, theirs)


@lru_cache(maxsize=8)
def is_readable(stored: bytes) -> bool:
    """Return True if the bytes are a valid tokenizer.json."""
    try:
        read_tokenizer(stored)
    except BadTokenizer:
        return False
    return True


def _ids_differ(ids: Mapping[str, int], their_ids: Mapping[str, int]) -> str | None:
    fewer, more = sorted((ids, their_ids), key=len)
    for token, number in fewer.items():
        if more.get(token) != number:
            at = f"{ids.get(token, 'none')}, not {their_ids.get(token, 'none')}"
            return f"the id of {token!r} is {at}"
    return None


def _merges_differ(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    merges, their_merges = (_merges(tokenizer) for tokenizer in (ours, theirs))
    common = min(len(merges), len(their_merges))
    if merges[:common] == their_merges[:common]:
        return None
    return "the merges are others"


def _merges(tokenizer: Tokenizer) -> list[Any]:
    """Return the merges as this library version writes them, so that two files can be compared."""
    return json.loads(tokenizer.to_str())["model"].get("merges") or []


def _texts_differ(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    for text in PROBES:
        if ours.encode(text, add_special_tokens=False).ids != theirs.encode(text, add_special_tokens=False).ids:
            return f"{text!r} is cut into other tokens"
    return None
