"""RULER's common words: find the 10 most frequent words in a numbered list. The prompt begins with a solved example.

In the large setting common words appear 30 times, others 3 times (example: 40 words, 10 and 3 times); in the small one
6 times and once (example: 20 words, 3 times and once). The public generator takes the small setting below a length of
4096. Here it is taken if the large one doesn't fit, and the sample records its setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

from hybridtron.regular_files import Unreadable, read_regular
from hybridtron.tasks.base import Sample, TaskError, TextTokens
from hybridtron.tasks.fitted import TaskText
from hybridtron.tasks.fitting import TooShort, most_units
from hybridtron.tasks.ruler.base import SHORT, RulerTask
from hybridtron.tasks.words import single_words

QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
# repeats of (common, other) words in the list; the same in the example; number of words in the example
REPEATS = {"large": ((30, 3), (10, 3), 40), "small": ((6, 1), (3, 1), 20)}
LARGEST_LIST = 2**26  # bytes


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """The common words task; texts grow by distinct words.

    setting  large, small, or auto (large if it fits)
    words    file with one word per line, instead of the 8166 words of the package wonderwords
    """

    generate: ClassVar[int] = 120

    name: str = "cwe"
    setting: str = "auto"
    words: str = ""
    faithful: bool = False

    @property
    def about(self) -> str:
        return "RULER: the 10 most common words of a list"

    def steps(self, length: int) -> tuple[int, int]:
        return 2 * COMMON, 10 if self.faithful else 1

    def check(self, length: int) -> None:
        super().check(length)
        if self.setting not in ("auto", *REPEATS):
            raise TaskError(
                f"{self.name}: setting={self.setting}: must be auto, {' or '.join(REPEATS)}", code="unknown-name"
            )

    def most(self, size: Callable[[int], int], tokenizer: TextTokens, length: int) -> int:
        """Return how many distinct words a sample has at first: fitted for each sample, unless `faithful`.

        Words are repeated up to 30 times, so lists with equally many words differ by hundreds of letters.
        """
        if self.faithful:
            return super().most(size, tokenizer, length)
        return most_units(size, length, *self.steps(length))

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self.check(length)
        if self.setting == "auto" and self.faithful:
            return replace(self, setting="small" if length < SHORT else "large").sample(seed, index, tokenizer, length)
        if self.setting == "auto":
            try:
                return replace(self, setting="large").sample(seed, index, tokenizer, length)
            except TooShort:
                return replace(self, setting="small").sample(seed, index, tokenizer, length)
        sample = super().sample(seed, index, tokenizer, length)
        if sample.meta["units"] >= len(known := word_list(self.words)):
            cure = "words=FILE names a longer list"
            raise TaskError(
                f"{self.name}: a length of {length} has room for more than the {len(known)} words; {cure}",
                code="does-not-fit",
            )
        return sample

    def text_of(self, random: Random, units: int, index: int, length: int) -> TaskText:
        repeats, example_repeats, example_words = REPEATS[self.setting]
        known = word_list(self.words)
        common, context = self.drawn(known, random, min(units, len(known)), repeats)
        example, example_context = self.drawn(known, random, example_words, example_repeats)
        example_text = f"{QUESTION.format(context=example_context)}{PREFIX}{numbered(example)}\n"
        meta = {"setting": self.setting, "common": common, "example": example}
        return TaskText(example_text + QUESTION.format(context=context), PREFIX, numbered(common), tuple(common), meta)

    def drawn(
        self, known: tuple[str, ...], random: Random, count: int, repeats: tuple[int, int]
    ) -> tuple[list[str], str]:
        """Draw `count` words, the first COMMON of which are common; returns the common ones and the numbered list."""
        words = random.sample(known, count)
        common = words[:COMMON]
        others = words[COMMON:]
        shuffled = self.shuffled(common * repeats[0] + others * repeats[1], random)
        return common, numbered(shuffled).strip()


def numbered(words: list[str]) -> str:
    """Write a numbered list: ` 1. a 2. b`."""
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


@cache
def word_list(file: str) -> tuple[str, ...]:
    """Return a file's distinct words, sorted; without a file, those of wonderwords.

    Raises TaskError if the file can't be read or has too few words.
    """
    if not file:
        return single_words()
    try:
        lines = read_regular(Path(file), LARGEST_LIST).decode().splitlines()
    except (Unreadable, OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cwe: words={file} can't be read: {error}", code="unreadable") from error
    words = tuple(sorted({line.strip() for line in lines} - {""}))
    if len(words) < REPEATS["large"][2]:
        raise TaskError(
            f"cwe: words={file} has {len(words)} words; the example alone takes {REPEATS['large'][2]}",
            code="does-not-fit",
        )
    return words
