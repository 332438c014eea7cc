"""Opening tokenizers: the text of a tokenizer.json -> a tokenizer. No other file opens tokenizers. Needs no torch."""

from __future__ import annotations

from tokenizers import Tokenizer


class BadTokenizer(ValueError):
    """Raised when a text is not a tokenizer.json, or this version of the `tokenizers` package can't read it."""


def read_tokenizer(stored: bytes | str, spelled: bool = False) -> Tokenizer:
    """Parse a tokenizer.json; the tokenizer neither truncates nor pads.

    spelled: treat special tokens in a text as ordinary text
    """
    try:
        tokenizer = Tokenizer.from_str(stored if isinstance(stored, str) else stored.decode())
    except Exception as error:  # the package raises nothing narrower
        raise BadTokenizer(str(error)) from error
    tokenizer.no_truncation()  # the file may hold the settings of its last use
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = spelled
    return tokenizer
