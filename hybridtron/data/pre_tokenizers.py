"""Pre-tokenizers, which split a text before byte pairs are merged, by their names in llama.cpp.

llama.cpp stores a pre-tokenizer's name instead of its pattern, and implements the pattern of each name. Its converter
recognizes only tokenizers of published models. For a tokenizer that was trained here, a user must give it the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridtron.nested import NotParsed, json_of

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[str, str | None] = {
    "gpt-2": None,
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
}
"""Pattern of each pre-tokenizer; None: the pattern that byte-level pre-tokenizers have by default.

They differ most in numbers: gpt-2 keeps a number in one piece, llama-bpe splits it into pieces of three digits, and
qwen2 into single digits.
"""
DEFAULT = "gpt-2"


def pre_tokenizer(name: str) -> PreTokenizer:
    """Make the pre-tokenizer with this name."""
    from tokenizers import Regex  # deferred, because command lines need only the names
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    pattern = PATTERNS[name]
    if pattern is None:
        return ByteLevel(add_prefix_space=False)
    split = Split(Regex(pattern), behavior="isolated", invert=False)
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def known_name(stored: bytes | str) -> str | None:
    """Return the name of a tokenizer.json's pre-tokenizer; None if it has no name here, or the text does not parse."""
    try:
        parsed = json_of(stored)
    except NotParsed:
        return None
    if not isinstance(parsed, dict):
        return None
    entry = parsed.get("pre_tokenizer")
    return next((name for name in PATTERNS if _parts(entry) == _parts(_stored(name))), None)


def _stored(name: str) -> Any:
    """Return the entry of a pre-tokenizer in tokenizer.json."""
    return json_of(pre_tokenizer(name).__getstate__())


def _parts(entry: Any) -> Any:
    """Return the settings in a pre-tokenizer's entry that change how a text is split."""
    if isinstance(entry, list):
        return [_parts(part) for part in entry]
    if not isinstance(entry, dict):
        return entry
    defaults = {"use_regex": True} if entry.get("type") == "ByteLevel" else {}
    return defaults | {key: _parts(value) for key, value in entry.items() if key != "trim_offsets"}
