"""RULER's frequent words: find the three most frequent coded words, whose frequencies follow a zeta distribution.

A text has N words. The word at rank k appears floor(N k^-2 / zeta(2)) times. The word at rank 1 is written as dots,
which the question excludes, so the answer is the words at ranks 2 to 4. A coded word has 6 random letters. The number
of different words is (length - 50) // 50, but at least 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, pi
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from hybridtron.tasks.fitted import TaskText
from hybridtron.tasks.ruler.base import RulerTask, listed

QUESTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
DOTS = "..."
ZETA_2 = pi**2 / 6
LETTERS = 6
# Minimum N. From this number on the word at rank 4 is more frequent than the word at rank 5:
# floor(c / 16) > floor(c / 25) with c = N / zeta(2).
FEWEST = 74


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """The frequent words task; texts grow by words.

    faithful  also reproduce unintended properties of the public generator (base.py)
    """

    generate: ClassVar[int] = 50

    name: str = "fwe"
    faithful: bool = False

    @property
    def about(self) -> str:
        return "RULER: the 3 most frequent words of a coded text"

    def steps(self, length: int) -> tuple[int, int]:
        if self.faithful:
            return (max(FEWEST, length // 6), max(length // 32, 1))
        return (FEWEST, 1)

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        words: list[str] = []
        while len(words) < max((length - self.generate) // 50, 4):
            word = "".join(random.choices(ascii_lowercase, k=LETTERS))
            words += [word] if word not in words else []
        counts = [floor(units * rank**-2 / ZETA_2) for rank in range(1, len(words) + 1)]
        coded_words = [word for word, count in zip([DOTS, *words[1:]], counts, strict=True) for _ in range(count)]
        context = " ".join(self.shuffled(coded_words, random))
        outputs = tuple(words[1:4])
        meta = {"counts": [count for count in counts if count]}
        return TaskText(QUESTION.format(context=context), PREFIX, f" {listed(outputs)}.", outputs, meta)
