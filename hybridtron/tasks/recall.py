"""Joint recall with any number of context levels (HAX, section 3.2 and appendices C.1 and D), as token ids.

A table has a value for every combination of tokens, one from each level. It is written as nested blocks: a token of a
level, then the blocks of the next level; a token of the last level is a key, followed by its value. A row:

    BOS, the table with every level in random order, SEP, the table with every level in another random order

In the second table each value is learned and scored, predicted at its key. With one level, the task is associative
recall of many queries; with two it is joint recall: a key's value depends on a context.

    vocabulary   BOS 1, EOS 2, PAD 3, SEP 4; values 10-25, keys 26-41, contexts 42-57, their contexts 58-73, ...

The paper has 5 to 16 contexts of 5 to 16 keys; a row is 2 * contexts * (2 * keys + 1) + 2 tokens long, 1058 at most.
With `padded` every row has exactly `length` tokens, so that a training row holds one table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from random import Random

from hybridtron.tasks.base import Sample, TaskError, TextTokens, TokenTask

BOS = 1
EOS = 2
PADDING = 3
SEPARATOR = 4
VOCABULARY = 100
SYMBOLS = 16  # number of different tokens of each level, and of values
FIRST_VALUE = 10
FIRST_KEY = 26
MOST_LEVELS = 4  # the maximum for a vocabulary of 100
Table = dict[tuple[int, ...], int]


@dataclass(frozen=True)
class JointRecall(TokenTask):
    """Joint recall: keys whose values depend on contexts.

    sizes    each level's number of tokens, outermost first: `5-16,5-16` draws two numbers from 5 to 16
    symbols  number of different tokens from which each level and the values are drawn, at most 16
    padded   fill rows to the length with PAD, which is not learned
    """

    name: str = "joint_recall"
    sizes: str = "5-16,5-16"
    symbols: int = SYMBOLS
    padded: bool = False

    @property
    def about(self) -> str:
        return f"values by {len(self.sizes.split(','))} levels of keys (token ids)"

    @property
    def num_tokens(self) -> int:
        return VOCABULARY

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        ranges = self.ranges()
        if (needed := row_length([largest for _, largest in ranges])) > length:
            raise TaskError(
                f"{self.name}: sizes={self.sizes}: a length of {length} can't fit it; it needs {needed}",
                code="does-not-fit",
            )
        random = self.random(seed, index)
        counts = [random.randint(fewest, most) for fewest, most in ranges]
        firsts = [FIRST_KEY + SYMBOLS * above for above in reversed(range(len(counts)))]
        levels = [
            random.sample(range(first, first + self.symbols), count)
            for first, count in zip(firsts, counts, strict=True)
        ]
        table = {path: random.randrange(FIRST_VALUE, FIRST_VALUE + self.symbols) for path in product(*levels)}
        first_table, second_table = (blocks(table, levels, (), random) for _ in range(2))
        prefix = (BOS, *first_table, SEPARATOR)
        if self.padded:
            padding = (PADDING,) * (length - len(prefix) - len(second_table))
        else:
            padding = ()
        tokens = (*prefix, *second_table, *padding)
        mask = (*(0 for _ in prefix), *(int(token < FIRST_KEY) for token in second_table), *(0 for _ in padding))
        first = mask.index(1)
        answer = " ".join(str(token) for token in second_table if token < FIRST_KEY)
        return Sample(
            self.name,
            seed,
            index,
            " ".join(map(str, tokens[:first])),
            answer,
            tokens,
            mask,
            tuple(answer.split()),
            generate=len(prefix) + len(second_table) - first,
            max_length=length,
            meta={"levels": levels},
        )

    def ranges(self) -> list[tuple[int, int]]:
        """Parse `sizes` into each level's minimum and maximum number of tokens. Raises TaskError if it is invalid."""
        matches = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in self.sizes.split(",")]
        ranges = [(int(match[1]), int(match[2] or match[1])) for match in matches if match]
        if not 1 <= self.symbols <= SYMBOLS:
            raise TaskError(f"{self.name}: symbols={self.symbols}: must be from 1 to {SYMBOLS}", code="out-of-range")
        usable = all(1 <= fewest <= most <= self.symbols for fewest, most in ranges)
        if not usable or not 1 <= len(ranges) == len(matches) <= MOST_LEVELS:
            cure = f"1 to {MOST_LEVELS} ranges from 1 to {self.symbols}, such as 5-16,5-16"
            raise TaskError(f"{self.name}: sizes={self.sizes}: must be {cure}", code="out-of-range")
        return ranges

    def chance(self) -> float:
        return 1 / self.symbols


def blocks(table: Table, levels: Sequence[Sequence[int]], path: tuple[int, ...], random: Random) -> list[int]:
    """Return the table below `path` as tokens, with each level in random order; values follow their keys."""
    if len(path) == len(levels):
        return [table[path]]
    tokens: list[int] = []
    for token in random.sample(levels[len(path)], len(levels[len(path)])):
        tokens += [token, *blocks(table, levels, (*path, token), random)]
    return tokens


def row_length(counts: Sequence[int]) -> int:
    """Return a row's length: BOS, SEP, and twice the table, with a token for each node of each level and the values."""
    paths = [prod(counts[: depth + 1]) for depth in range(len(counts))]
    return 2 + 2 * (sum(paths) + paths[-1])
