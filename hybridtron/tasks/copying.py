"""The copying task: a string of random letters, to be repeated, as token ids `$ s | s .` (Jelassi et al. 2024).

    vocabulary   26 letters (0-25), $ (26), | (27), . (28), * for padding (29)

The copy and its period are learned. A row holds one string, or strings packed back to back to exactly `length` tokens;
the last one is then cut off and not learned. The length paper (Table 1) trains on 50 to 100 letters and tests on 300.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from hybridtron.tasks.base import IGNORED, Sample, TaskError, TextTokens, TokenTask
from hybridtron.tasks.metrics import character_accuracy

LETTERS = 26
START, MIDDLE, END, PADDING = range(LETTERS, LETTERS + 4)
FIXED = 3  # tokens of a string besides its letters
SYMBOLS = ascii_lowercase + "$|.*"


@dataclass(frozen=True)
class Copying(TokenTask):
    """The copying task.

    shortest, longest  range from which the number of letters is drawn. longest=0: as many as the row can hold;
                       shortest=0: the same number as longest
    packed             fill rows to exactly `length` tokens, for training
    """

    name: str = "copying"
    shortest: int = 0
    longest: int = 0
    packed: bool = False

    @property
    def about(self) -> str:
        return "a string of letters, to be copied (token ids)"

    @property
    def num_tokens(self) -> int:
        return len(SYMBOLS)

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        shortest, longest = self._letters(length)
        random = self.random(seed, index)
        tokens: list[int] = []
        mask: list[int] = []
        strings = []
        while not strings or (self.packed and len(tokens) < length):
            letters = random.choices(range(LETTERS), k=random.randint(shortest, longest))
            is_complete = len(tokens) + 2 * len(letters) + FIXED <= length
            tokens += [START, *letters, MIDDLE, *letters, END]
            mask += [0] * (len(letters) + 2) + [int(is_complete)] * (len(letters) + 1)
            strings.append(spelled(letters))
        tokens = tokens[:length]
        mask = mask[:length]
        first = mask.index(1)
        return Sample(
            self.name,
            seed,
            index,
            spelled(tokens[:first]),
            spelled(tokens[first:]),
            tuple(tokens),
            tuple(mask),
            (strings[0],),
            generate=len(tokens) - first,
            max_length=length,
            meta={"strings": strings},
        )

    def _letters(self, length: int) -> tuple[int, int]:
        """Return the minimum and maximum number of letters. Raises TaskError if the longest does not fit."""
        room = (length - FIXED) // 2
        longest = self.longest or room
        shortest = self.shortest or longest
        if not 1 <= shortest <= longest:
            options = f"shortest={shortest} longest={longest}"
            raise TaskError(
                f"{self.name}: {options}: must be at least 1 letter, and longest not below shortest",
                code="out-of-range",
            )
        if longest > room:
            needed = f"it needs {2 * longest + FIXED}"
            raise TaskError(
                f"{self.name}: longest={longest}: a length of {length} can't fit the row; {needed}", code="does-not-fit"
            )
        return shortest, longest

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Score generated letters, as `spelled` writes them.

        `accuracy` is the fraction of right letters, `exact` is 1 if all are right.
        """
        (wanted,) = sample.outputs
        return {"accuracy": character_accuracy(answer, wanted), "exact": float(answer.startswith(wanted))}

    def is_scored(self, target: int) -> bool:
        """Check that a position counts; the final period is learned but not scored."""
        return target not in (IGNORED, END)

    def chance(self) -> float:
        return 1 / LETTERS


def spelled(tokens: list[int]) -> str:
    """Write ids as letters and symbols."""
    return "".join(SYMBOLS[token] for token in tokens)
