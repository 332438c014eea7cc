"""Metrics of an answer, each from 0 to 1. They are given the continuation alone: an echoed prompt must not count.

Suites normalize differently and so each has its own: RULER lowercases, LongBench's F1 drops punctuation and articles,
passkeys are compared as numbers. Sets of labels are in `babilong/`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """RULER's: stripped, control characters as newlines, stripped again."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """The share of the outputs that occur in the answer, in any case (RULER)."""
    written = cleaned(answer).lower()
    return sum(output.lower() in written for output in outputs) / len(outputs)


def string_match_part(answer: str, outputs: Sequence[str]) -> float:
    """Whether any of the outputs occurs in the answer, in any case (RULER's QA)."""
    written = cleaned(answer).lower()
    return float(any(output.lower() in written for output in outputs))


def exact_match(answer: str, outputs: Sequence[str]) -> float:
    """Whether the stripped answer is one of the outputs."""
    return float(answer.strip() in [output.strip() for output in outputs])


def first_integer(answer: str, wanted: int) -> float:
    """Whether the first integer in the answer is the wanted one (Landmark Attention's passkey)."""
    found = re.search(r"[0-9]+", answer)
    return float(found is not None and int(found[0]) == wanted)


def normalized(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (LongBench, SQuAD)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def f1(answer: str, outputs: Sequence[str]) -> float:
    """The largest F1 of shared words, over the outputs: 2 shared / (words of both)."""
    written = normalized(answer)
    return max(_f1(written, normalized(output)) for output in outputs)


def _f1(written: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(written) & Counter(wanted)).values())
    return 2 * shared / (len(written) + len(wanted)) if shared else 0.0


def character_accuracy(answer: str, wanted: str) -> float:
    """The share of the wanted characters that stand at their place."""
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted)
