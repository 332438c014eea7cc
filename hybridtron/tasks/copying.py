"""Copying a string of letters: `$ s | s .` as token ids (Jelassi et al. 2024; length paper, Table 1).

    vocabulary   26 letters (0-25), $ (26), | (27), . (28), * for padding (29)

The copy and its period are learned. A row holds one string, or strings packed back to back to exactly `length`
tokens, the last one cut and not learned. The length paper trains on 50 to 100 letters and tests 300.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from hybridtron.tasks.base import IGNORED, Sample, TaskError, TextTokens, TokenTask
from hybridtron.tasks.metrics import character_accuracy

LETTERS = 26
START, MIDDLE, END, PADDING = range(LETTERS, LETTERS + 4)
FIXED = 3  # tokens of a row beside its letters
SYMBOLS = ascii_lowercase + "$|.*"


@dataclass(frozen=True)
class Copying(TokenTask):
    """A string and its copy.

    shortest, longest  letters of a string, drawn uniformly; 0: as many as a row can hold
    packed             rows of exactly `length` tokens, for training
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
            whole = len(tokens) + 2 * len(letters) + FIXED <= length
            tokens += [START, *letters, MIDDLE, *letters, END]
            mask += [0] * (len(letters) + 2) + [int(whole)] * (len(letters) + 1)
            strings.append(spelled(letters))
        tokens, mask = tokens[:length], mask[:length]
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
        room = (length - FIXED) // 2
        longest = self.longest or room
        shortest = self.shortest or longest
        if not 1 <= shortest <= longest:
            asked = f"shortest={shortest} longest={longest}"
            raise TaskError(f"{self.name}: {asked}: at least 1 letter, and not fewer than the shortest")
        if longest > room:
            needed = f"it needs {2 * longest + FIXED}"
            raise TaskError(f"{self.name}: longest={longest}: a length of {length} can't fit the row; {needed}")
        return shortest, longest

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Of generated letters, spelled: `accuracy` by letter, `exact` for the whole string."""
        (wanted,) = sample.outputs
        return {"accuracy": character_accuracy(answer, wanted), "exact": float(answer.startswith(wanted))}

    def is_scored(self, target: int) -> bool:
        """The period is learned, and not scored."""
        return target not in (IGNORED, END)

    def chance(self) -> float:
        return 1 / LETTERS


def spelled(tokens: list[int]) -> str:
    """Ids as letters and signs."""
    return "".join(SYMBOLS[token] for token in tokens)
