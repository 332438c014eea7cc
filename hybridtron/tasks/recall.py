"""Joint recall, a synthetic task on token ids: a key's value depends on the context in which the key occurs.

The task is from the paper on HAX (section 3.2 and appendices C.1 and D), extended to any number of levels. A sample is
based on a random table. The table has levels of tokens: the last level has keys, the level before it has contexts, and
the level before that has contexts of contexts. A path is one token from each level, and the table has a value for every
path. The table is written as nested blocks. A block is a token followed by all blocks of the next level; in the last
level, a block is a key followed by its value. With contexts a, b and keys x, y, for instance: a x 1 y 2 b x 3 y 4. A
sample holds the table twice:

    BOS, the table with every level in random order, SEP, the table with every level in another random order

In the second table the values count in the loss and in the metrics. The model predicts a value when it reads the key.
With one level, the task is associative recall. With two levels it is joint recall. The token ids:

    BOS 1, EOS 2, PAD 3, SEP 4, values 10-25, keys 26-41, contexts 42-57, contexts of contexts 58-73, ...

The paper has 5 to 16 contexts with 5 to 16 keys each. Then a sample has 2 * contexts * (2 * keys + 1) + 2 tokens, at
most 1058. With `padded` every sample has exactly `length` tokens, so that each row in a training batch is one sample.
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
VOCABULARY = 100  # number of ids
SYMBOLS = 16  # number of ids that are reserved for each level, and for values
FIRST_VALUE = 10
FIRST_KEY = 26
MAX_LEVELS = 4  # with more levels, ids would exceed the vocabulary
Table = dict[tuple[int, ...], int]  # path -> value


@dataclass(frozen=True)
class JointRecall(TokenTask):
    """Joint recall: keys whose values depend on contexts.

    sizes    for each level, the range from which the number of its tokens is drawn; `5-16,5-16` stands for 5 to 16
             contexts and 5 to 16 keys
    symbols  number of different ids for each level's tokens, and for the values; at most 16
    padded   fill samples to the length with PAD, which does not count in the loss
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
                f"{self.name}: sizes={self.sizes}: a length of {length} can't fit a sample, which needs {needed}",
                code="does-not-fit",
            )
        random = self.random(seed, index)
        counts = [random.randint(fewest, most) for fewest, most in ranges]
        first_ids = [FIRST_KEY + SYMBOLS * levels_below for levels_below in reversed(range(len(counts)))]
        levels = [
            random.sample(range(first_id, first_id + self.symbols), count)
            for first_id, count in zip(first_ids, counts, strict=True)
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
        first_learned = mask.index(1)
        answer = " ".join(str(token) for token in second_table if token < FIRST_KEY)
        return Sample(
            self.name,
            seed,
            index,
            " ".join(map(str, tokens[:first_learned])),
            answer,
            tokens,
            mask,
            tuple(answer.split()),
            generate=len(prefix) + len(second_table) - first_learned,
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
        if not usable or not 1 <= len(ranges) == len(matches) <= MAX_LEVELS:
            cure = f"1 to {MAX_LEVELS} ranges from 1 to {self.symbols}, such as 5-16,5-16"
            raise TaskError(f"{self.name}: sizes={self.sizes}: must be {cure}", code="out-of-range")
        return ranges

    def chance(self) -> float:
        return 1 / self.symbols


def blocks(table: Table, levels: Sequence[Sequence[int]], path: tuple[int, ...], random: Random) -> list[int]:
    """Return the part of the table below `path` as tokens, with each level in random order.

    `path` has one token from each outer level; () is the full table.
    """
    if len(path) == len(levels):
        return [table[path]]
    tokens: list[int] = []
    for token in random.sample(levels[len(path)], len(levels[len(path)])):
        tokens += [token, *blocks(table, levels, (*path, token), random)]
    return tokens


def row_length(counts: Sequence[int]) -> int:
    """Return a sample's length for these numbers of tokens per level.

    A sample is BOS, SEP, and the table twice. A table has a token for each block and for each value.
    """
    paths = [prod(counts[: depth + 1]) for depth in range(len(counts))]
    return 2 + 2 * (sum(paths) + paths[-1])
