"""Passkey retrieval with Landmark Attention's prompt, in samples of exactly `length` tokens.

A sample has five parts, each encoded separately with its leading newline: instruction, filler, key, filler, question.
The filler is one repeated text, cut to the tokens that the other parts leave. The depth is the fraction of the filler
before the key.

Samba (section 3.3): `digits=5`, `depth_steps=11`, five keys for each depth, hence 55 samples per length. It trains on
documents of 4096 tokens with random depths (`depth_steps=0`) and keys. The length paper (section 5.2): `trim=left`, as
its Figure 8 begins in mid-sentence, and `end=.`, since models otherwise repeat the key; its Figure 8 has `digits=4`.
Landmark Attention itself cuts the filler by characters and draws keys from 1 to 50000, so its lengths vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hybridtron.tasks.base import Sample, Task, TaskError, TextTokens
from hybridtron.tasks.metrics import first_integer

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WARNING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
KEY = "\nThe pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\nWhat is the pass key? The pass key is"
TRIMS = ("left", "right")
MOST_DIGITS = 4_000  # Python refuses to format integers of more than 4,300 digits
MORE = 2  # tokens that an evaluation generates beyond the length of the answer


@dataclass(frozen=True)
class Passkey(Task):
    """Passkey retrieval: a number hidden in filler text.

    digits       how many digits the key has; the first is not 0
    depth_steps  sample i has depth (i mod depth_steps) / (depth_steps - 1); 0: drawn uniformly from 0 to 1
    trim         side on which the filler before the key is cut: left or right
    end          string that ends the answer
    """

    name: str = "passkey"
    digits: int = 5
    depth_steps: int = 11
    trim: str = "left"
    end: str = "."

    @property
    def about(self) -> str:
        return f"a key of {self.digits} digits in filler, by depth and length (Landmark Attention, Samba)"

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self._check()
        random = self.random(seed, index)
        key = random.randrange(10 ** (self.digits - 1), 10**self.digits)
        depth = depth_of(index, self.depth_steps, random)
        answer = f" {key}{self.end}"
        encode = tokenizer.encode
        parts = [encode(text) for text in (WARNING, "\n", KEY.format(key=key), "\n", QUESTION, answer)]
        warning, before, middle, after, question, answer_ids = parts
        num_filler = length - sum(map(len, parts))
        if num_filler < 0:
            message = f"{self.name}: a length of {length} can't fit the sample without filler"
            raise TaskError(f"{message}; it needs {length - num_filler} tokens", code="does-not-fit")
        num_before = round(depth * num_filler)
        filler = prefix_filler(tokenizer, num_before, self.trim)
        prompt = [*warning, *before, *filler, *middle, *after, *tiled(tokenizer, num_filler - num_before), *question]
        return Sample(
            self.name,
            seed,
            index,
            tokenizer.decode(prompt),
            answer,
            (*prompt, *answer_ids),
            (0,) * len(prompt) + (1,) * len(answer_ids),
            (str(key),),
            generate=len(answer_ids) + MORE,
            max_length=length,
            meta={"key": key, "depth": depth, "filler": [num_before, num_filler - num_before]},
        )

    def score(self, sample: Sample, answer: str) -> dict[str, float]:
        """Return `exact`, 1 if the first integer is the key, and `token_exact`, 1 if the answer matches verbatim."""
        is_verbatim = answer.startswith(sample.answer)
        return {"exact": first_integer(answer, int(sample.outputs[0])), "token_exact": float(is_verbatim)}

    def chance(self) -> float:
        return 1 / (9 * 10 ** (self.digits - 1))

    def _check(self) -> None:
        if not 1 <= self.digits <= MOST_DIGITS:
            raise TaskError(
                f"{self.name}: digits={self.digits}: must be from 1 to {MOST_DIGITS:,}", code="out-of-range"
            )
        if self.trim not in TRIMS:
            raise TaskError(f"{self.name}: trim={self.trim}: must be {' or '.join(TRIMS)}", code="unknown-name")


def depth_of(index: int, steps: int, random: Random) -> float:
    """Return a sample's depth, from 0 (start of the filler) to 1: on a grid of `steps` depths, or random if it is 0.

    Raises TaskError for a single step.
    """
    if steps == 0:
        return random.random()
    if steps < 2:
        raise TaskError(f"depth_steps={steps}: at least 2 depths make a grid, and 0 draws them", code="out-of-range")
    return index % steps / (steps - 1)


def tiled(tokenizer: TextTokens, count: int) -> list[int]:
    """Return `count` tokens of the filler text, repeated with spaces in between."""
    tokens = tokenizer.encode(FILLER)
    repeated = tokenizer.encode(f" {FILLER}")
    while len(tokens) < count:
        tokens += repeated
    return tokens[:count]


def prefix_filler(tokenizer: TextTokens, count: int, trim: str) -> list[int]:
    """Return `count` tokens of filler, cut on the left, so that it ends with a full sentence, or on the right."""
    if trim == "right" or count == 0:
        return tiled(tokenizer, count)
    first = tokenizer.encode(FILLER)
    repeated = tokenizer.encode(f" {FILLER}")
    units = max(0, -(-(count - len(first)) // len(repeated)))
    return [*first, *(repeated * units)][-count:]
