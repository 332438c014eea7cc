"""Comparison of two tokenizers: do equal token ids mean equal text? Needs no torch.

Two files for the same tokenizer need not have equal bytes: the file depends on the version of the `tokenizers` package
that wrote it, and fine-tuning may have added tokens. So three properties are compared:

- Every token in the smaller vocabulary has the same id in the larger vocabulary.
- The longer list of BPE merges begins with the shorter list.
- Both tokenizers give the same ids for PROBES, which are texts that tokenizers usually split differently.
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


def difference(model_json: bytes, data_json: bytes) -> str | None:
    """Return the first difference between two tokenizers, as text for a message; None if they agree.

    model_json: contents of the tokenizer.json with which a model was trained
    data_json: contents of the tokenizer.json for other data

    Both must be readable (`is_readable`). Either may have additional tokens and merges.
    """
    if model_json == data_json:
        return None
    return _difference(model_json, data_json)


@lru_cache(maxsize=8)
def _difference(model_json: bytes, data_json: bytes) -> str | None:
    ours = read_tokenizer(model_json)
    theirs = read_tokenizer(data_json)
    ids = ours.get_vocab(with_added_tokens=True)
    their_ids = theirs.get_vocab(with_added_tokens=True)
    return _ids_differ(ids, their_ids) or _merges_differ(ours, theirs) or _texts_differ(ours, theirs)


@lru_cache(maxsize=8)
def is_readable(stored: bytes) -> bool:
    """Return True if the bytes are a tokenizer.json that can be opened."""
    try:
        read_tokenizer(stored)
    except BadTokenizer:
        return False
    return True


def _ids_differ(ids: Mapping[str, int], their_ids: Mapping[str, int]) -> str | None:
    fewer, more = sorted((ids, their_ids), key=len)
    for token, number in fewer.items():
        if more.get(token) != number:
            at = f"{ids.get(token, 'missing')} in the model's and {their_ids.get(token, 'missing')} in the data's"
            return f"the id of {token!r} is {at} vocabulary"
    return None


def _merges_differ(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    merges, their_merges = (_merges(tokenizer) for tokenizer in (ours, theirs))
    common = min(len(merges), len(their_merges))
    if merges[:common] == their_merges[:common]:
        return None
    return "the BPE merges differ"


def _merges(tokenizer: Tokenizer) -> list[Any]:
    """Return the BPE merges in the installed `tokenizers` version's format, so that they can be compared."""
    return json.loads(tokenizer.to_str())["model"].get("merges") or []


def _texts_differ(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    for text in PROBES:
        if ours.encode(text, add_special_tokens=False).ids != theirs.encode(text, add_special_tokens=False).ids:
            return f"the text {text!r} is split into other tokens"
    return None
