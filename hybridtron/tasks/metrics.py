"""Metrics of an answer, each from 0 to 1. They take the continuation without the prompt, whose words must not count.

Each suite normalizes text in its own way: RULER ignores case, LongBench's F1 drops punctuation and articles, passkeys
are compared as numbers. BABILong's metrics, which compare sets of labels, are in `babilong/`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """Normalize an answer as RULER does: strip it, replace control characters by newlines, strip again."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """Return the fraction of the outputs that occur in the answer, ignoring case (RULER)."""
    written = cleaned(answer).lower()
    return sum(output.lower() in written for output in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """Return 1 if any output occurs in the answer, ignoring case, else 0 (RULER's QA)."""
    written = cleaned(answer).lower()
    return float(any(output.lower() in written for output in outputs))


def exact_match(answer: str, outputs: Sequence[str]) -> float:
    """Return 1 if the stripped answer equals one of the outputs, else 0."""
    return float(answer.strip() in [output.strip() for output in outputs])


def first_integer(answer: str, wanted: int) -> float:
    """Return 1 if the first integer in the answer is the wanted one, else 0 (Landmark Attention's passkey)."""
    match = re.search(r"[0-9]+", answer)
    if match is None:
        return 0.0
    digits = match[0].lstrip("0") or "0"  # compared as text, since Python refuses to read integers of many digits
    return float(digits == str(wanted))


def normalized(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation and articles (LongBench, SQuAD)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def f1(answer: str, outputs: Sequence[str]) -> float:
    """Return the answer's word F1, 2 shared / (words in both), with the output for which it is largest."""
    written = normalized(answer)
    return max(_f1(written, normalized(output)) for output in outputs)


def _f1(written: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(written) & Counter(wanted)).values())
    if shared:
        return 2 * shared / (len(written) + len(wanted))
    return 0.0


def character_accuracy(answer: str, wanted: str) -> float:
    """Return the fraction of wanted characters that are at the same position in the answer."""
    return sum(written == right for written, right in zip(answer, wanted, strict=False)) / len(wanted)
