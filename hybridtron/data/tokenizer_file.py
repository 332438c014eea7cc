"""Opens the contents of a tokenizer.json as a `Tokenizer` of the `tokenizers` package. Needs no torch."""

from __future__ import annotations

from tokenizers import Tokenizer


class BadTokenizer(ValueError):
    """Raised when a text is not a tokenizer.json, or the installed `tokenizers` package can't read it."""


def read_tokenizer(stored: bytes | str, spelled: bool = False) -> Tokenizer:
    """Parse a tokenizer.json. The returned tokenizer neither truncates nor pads.

    spelled: True to encode a special token's name in a text as ordinary characters; False to encode it as the special
        token
    """
    try:
        tokenizer = Tokenizer.from_str(stored if isinstance(stored, str) else stored.decode())
    except Exception as error:  # the package raises plain `Exception` objects
        raise BadTokenizer(str(error)) from error
    tokenizer.no_truncation()  # the file may store settings for truncation and padding
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = spelled
    return tokenizer
