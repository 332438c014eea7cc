"""English words from the package wonderwords (extra `tasks`), and random sentences made from these words.

RULER's keys (`adjective-noun`) and word lists are drawn from the words. The sentences are the haystack if there is no
corpus. They have 8 to 25 words. They contain no digit and no word that begins with "magic", so that they cannot be
mistaken for a needle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from random import Random

from hybridtron.tasks.base import TaskError

KINDS = ("noun", "adjective", "verb")
MIN_WORDS = 8  # minimum number of words in a sentence
MAX_WORDS = 25  # maximum number of words in a sentence
CLAUSES = (  # n: noun, a: adjective, v: verb
    "the {a} {n} near the {n} will {v} before the {n} can {v}",
    "a {n} that seems {a} may still {v} without any {n}",
    "nobody expects the {n} to {v} while the {n} remains {a}",
    "every {n} in the {a} {n} knows how to {v}",
    "people who {v} with a {n} rarely think about the {n}",
    "it is hard to {v} when the {n} is so {a}",
    "some of the {a} things about a {n} are also true of the {n}",
    "there was a time when a {n} could {v} for the {n}",
    "the question is whether the {a} {n} should {v} or not",
    "most writers describe the {n} as {a} and the {n} as {a}",
    "in the end the {n} did {v} and the {n} was {a} again",
    "one reason to {v} is that the {n} looks more {a} than the {n}",
    "a {a} {n} is worth more than a {a} {n} to those who {v}",
    "the {n} of the {n} has nothing to do with the {a} {n}",
    "they asked the {n} to {v} because the {n} had become {a}",
    "if you {v} too early the {n} turns out to be {a}",
    "what makes a {n} {a} is the way in which it can {v}",
    "the {a} part of the work is to {v} like a {n}",
    "anyone can {v} but only a {a} {n} would do it twice",
    "as long as the {n} is {a} the {n} will not {v}",
    "she wanted to {v} and he wanted a {n} with a {a} {n}",
    "when the {n} was young it used to {v} beside the {a} {n}",
    "the difference between a {n} and a {n} is that both can {v}",
    "after the {a} winter the {n} began to {v} like a {n}",
    "we could not {v} until somebody found the {a} {n}",
    "the {n} which stands behind the {n} appears quite {a} today",
    "a {n} may {v} slowly and yet be more {a} than the {n}",
    "they would rather {v} than wait for the {a} {n} to {v}",
    "the {n} was {a} and the {n} was not even close to {a}",
    "all that remains of the {n} is a {a} {n} which they {v}",
)
JOINTS = (", and ", ", but ", " because ", ", so ", " although ")  # join two clauses into one sentence


@cache
def lists() -> dict[str, tuple[str, ...]]:
    """Return the distinct words of each kind (noun, adjective, verb), sorted.

    Raises TaskError if wonderwords is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ModuleNotFoundError as error:
        cure = "run pip install 'hybridtron[tasks]', or choose a task without words: passkey, vt, fwe, niah_multikey_3"
        raise TaskError(
            f"this task needs the package wonderwords, which is not installed: {cure}", code="not-installed"
        ) from error
    words = RandomWord()
    return {kind: tuple(sorted(set(words.filter(include_categories=[kind])))) for kind in KINDS}


def word_pair(random: Random) -> str:
    """Return a random key `adjective-noun`."""
    return f"{random.choice(lists()['adjective'])}-{random.choice(lists()['noun'])}"


@cache
def single_words() -> tuple[str, ...]:
    """Return the distinct words of all kinds, sorted."""
    return tuple(sorted({word for words in lists().values() for word in words}))


@cache
def _plain() -> dict[str, tuple[str, ...]]:
    """Return words by the first letter of their kind: n, a or v.

    Only words in lower-case letters are included, and no words that begin with `magic`.
    """
    pattern = re.compile(r"(?!magic)[a-z]+\Z")
    return {kind[0]: tuple(word for word in words if pattern.match(word)) for kind, words in lists().items()}


def sentences() -> Iterator[str]:
    """Yield random sentences without end, the same sentences in every call."""
    random = Random("sentences")
    while True:
        text = _clause(random)
        if random.random() < 0.4:
            longer = f"{text}{random.choice(JOINTS)}{_clause(random)}"
            text = longer if len(longer.split()) <= MAX_WORDS else text
        if len(text.split()) >= MIN_WORDS:
            yield f"{text[0].upper()}{text[1:]}."


def _clause(random: Random) -> str:
    """Return a random clause, filled with random words."""
    return re.sub(r"\{(\w)\}", lambda kind: random.choice(_plain()[kind[1]]), random.choice(CLAUSES))
