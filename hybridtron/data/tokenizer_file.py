"""The text of a tokenizer.json -> a tokenizer; the one place that opens one. Without torch."""

from __future__ import annotations

from tokenizers import Tokenizer


class BadTokenizer(ValueError):
    """It is no tokenizer.json, or one that this version of the package can't read."""


def read_tokenizer(stored: bytes | str, spelled: bool = False) -> Tokenizer:
    """It reads whole texts as they are; with `spelled`, a special token in a text is spelled like any other word."""
    try:
        tokenizer = Tokenizer.from_str(stored if isinstance(stored, str) else stored.decode())
    except Exception as error:  # the package raises nothing narrower
        raise BadTokenizer(str(error)) from error
    tokenizer.no_truncation()  # the file may hold the settings of its last use
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = spelled
    return tokenizer
