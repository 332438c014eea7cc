"""The copying task (Jelassi et al. 2024), on token ids: a string s of random letters must be repeated, `$ s | s .`

    vocabulary   26 letters (0-25), $ (26), | (27), . (28), * for padding (29)

The copy and its period count in the loss. A sample holds one string with its copy. With `packed` it holds several
strings with their copies, and has exactly `length` tokens. If a packed sample ends before the last string's copy is
complete, this copy does not count in the loss. Buitrago Ruiz & Gu (Table 1) train on strings with 50 to 100 letters and
test on 300.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from hybridtron.tasks.base import IGNORED, Sample, TaskError, TextTokens, TokenTask
from hybridtron.tasks.metrics import character_accuracy

LETTERS = 26
START, MIDDLE, END, PADDING = range(LETTERS, LETTERS + 4)
FIXED = 3  # tokens besides the letters of a string and its copy: $ | .
SYMBOLS = ascii_lowercase + "$|.*"


@dataclass(frozen=True)
class Copying(TokenTask):
    """The copying task.

    shortest  minimum number of letters in a string; 0 stands for the maximum, so that all strings are equally long
    longest   maximum number of letters in a string; 0 stands for the largest number that fits the length
    packed    fill samples with strings to exactly `length` tokens, for training
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
        first_learned = mask.index(1)
        return Sample(
            self.name,
            seed,
            index,
            spelled(tokens[:first_learned]),
            spelled(tokens[first_learned:]),
            tuple(tokens),
            tuple(mask),
            (strings[0],),
            generate=len(tokens) - first_learned,
            max_length=length,
            meta={"strings": strings},
        )

    def _letters(self, length: int) -> tuple[int, int]:
        """Return the minimum and maximum number of letters. Raises TaskError if the options are not possible."""
        room = (length - FIXED) // 2
        longest = self.longest or room
        shortest = self.shortest or longest
        if not 1 <= shortest <= longest:
            options = f"shortest={shortest} longest={longest}"
            raise TaskError(
                f"{self.name}: {options}: must be at least 1, and longest must be at least shortest",
                code="out-of-range",
            )
        if longest > room:
            needed = f"which needs {2 * longest + FIXED} tokens"
            raise TaskError(
                f"{self.name}: longest={longest}: a length of {length} can't fit a sample, {needed}",
                code="does-not-fit",
            )
        return shortest, longest

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Return the metrics for an answer with generated letters, in the form of `spelled`.

        `accuracy` is the fraction of correct letters, and `exact` is 1 if all letters are correct, else 0.
        """
        (target,) = sample.outputs
        return {"accuracy": character_accuracy(answer, target), "exact": float(answer.startswith(target))}

    def is_scored(self, target: int) -> bool:
        """Return True if a position with this target counts in the metrics.

        The final period counts only in the loss.
        """
        return target not in (IGNORED, END)

    def chance(self) -> float:
        return 1 / LETTERS


def spelled(tokens: list[int]) -> str:
    """Return token ids as text: one letter or symbol for each id."""
    return "".join(SYMBOLS[token] for token in tokens)
