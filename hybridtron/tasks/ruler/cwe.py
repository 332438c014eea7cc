"""RULER's common words: find the 10 most frequent words in a numbered list. The prompt begins with a solved example.

In a list, 10 words are common: each of them appears more often than each word that is not common. Two settings say how
often words appear:

              list:                     example:
    setting   common words   others     common words   others    different words
    large     30 times       3 times    10 times       3 times   40
    small     6 times        once       3 times        once      20

The public generator uses the small setting for lengths below 4096. By default, this task uses the small setting if the
large setting does not fit the length. A sample records its setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

from hybridtron.safe_open import Unreadable, read_regular
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
COMMON = 10  # number of common words
# setting -> (repeats in the list, repeats in the example, number of different words in the example); repeats are
# (repeats of each common word, repeats of each other word)
REPEATS = {"large": ((30, 3), (10, 3), 40), "small": ((6, 1), (3, 1), 20)}
MAX_LIST_BYTES = 2**26  # maximum size of a file with words


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """The common words task. The number of distinct words sets the length of a text.

    setting   large, small, or auto: large if the large setting fits the length, else small. With `faithful`, auto means
              the setting that the public generator uses
    words     file with one word per line; "" stands for the 8166 words in the package wonderwords
    faithful  also reproduce unintended properties of the public generator (base.py)
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
        """Return the number of distinct words with which the search for the length begins, for one sample.

        One number for all samples would fit badly. A word is repeated up to 30 times, so lists with equal numbers of
        words differ by hundreds of letters.
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
            cure = "set words=FILE to a longer list, or choose a smaller length"
            raise TaskError(
                f"{self.name}: a length of {length} has room for more than all {len(known)} words; {cure}",
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
        """Draw `count` words, of which the first COMMON words are the common words.

        repeats: (how often each common word appears in the list, how often each other word appears)

        Returns the common words, and the text of the numbered list in random order.
        """
        words = random.sample(known, count)
        common = words[:COMMON]
        other_words = words[COMMON:]
        shuffled = self.shuffled(common * repeats[0] + other_words * repeats[1], random)
        return common, numbered(shuffled).strip()


def numbered(words: list[str]) -> str:
    """Return a numbered list as text: ` 1. a 2. b`."""
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


@cache
def word_list(file: str) -> tuple[str, ...]:
    """Return the distinct words in a file, sorted; if `file` is "", return the words in the package wonderwords.

    Raises TaskError if the file can't be read or has too few words.
    """
    if not file:
        return single_words()
    try:
        lines = read_regular(Path(file), MAX_LIST_BYTES).decode().splitlines()
    except (Unreadable, OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cwe: words={file} can't be read: {error}", code="unreadable") from error
    words = tuple(sorted({line.strip() for line in lines} - {""}))
    if len(words) < REPEATS["large"][2]:
        raise TaskError(
            f"cwe: words={file} has {len(words)} words; the example alone needs {REPEATS['large'][2]}",
            code="does-not-fit",
        )
    return words
