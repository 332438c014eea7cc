"""Metrics of a generated answer, each from 0 to 1. The answer does not include the prompt.

Benchmarks normalize text in different ways before they compare it:

    RULER              ignores case
    LongBench's F1     ignores case, punctuation and articles
    passkey retrieval  compares numbers

BABILong's metrics compare sets of labels; they are in `babilong/task.py`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """Normalize a text like RULER: strip it, replace control characters with newlines, and strip it again."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """Return the fraction of the outputs that occur in the answer, ignoring case (RULER)."""
    text = cleaned(answer).lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """Return 1 if any output occurs in the answer, ignoring case, else 0 (RULER's QA)."""
    text = cleaned(answer).lower()
    return float(any(output.lower() in text for output in outputs))


def exact_match(answer: str, outputs: Sequence[str]) -> float:
    """Return 1 if the stripped answer equals any output, else 0."""
    return float(answer.strip() in [output.strip() for output in outputs])


def first_integer(answer: str, wanted: int) -> float:
    """Return 1 if the first integer in the answer is `wanted`, else 0 (Landmark Attention's passkey)."""
    match = re.search(r"[0-9]+", answer)
    if match is None:
        return 0.0
    digits = match[0].lstrip("0") or "0"  # compared as text, since Python does not convert integers of many digits
    return float(digits == str(wanted))


def normalized(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation and articles (LongBench, SQuAD)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def f1(answer: str, outputs: Sequence[str]) -> float:
    """Return the largest F1 between the answer and any output (LongBench, SQuAD).

    F1 is 2 * shared words / (words in the answer + words in the output). Both texts are split by `normalized`.
    """
    answer_words = normalized(answer)
    return max(_f1(answer_words, normalized(output)) for output in outputs)


def _f1(answer_words: list[str], target_words: list[str]) -> float:
    shared = sum((Counter(answer_words) & Counter(target_words)).values())
    if shared:
        return 2 * shared / (len(answer_words) + len(target_words))
    return 0.0


def character_accuracy(answer: str, wanted: str) -> float:
    """Return the fraction of `wanted`'s characters that the answer has at the same position."""
    return sum(written == right for written, right in zip(answer, wanted, strict=False)) / len(wanted)
