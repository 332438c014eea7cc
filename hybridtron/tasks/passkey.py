"""Passkey retrieval with the prompt of Landmark Attention, in samples of exactly `length` tokens.

A prompt has five parts: instruction, filler, key, filler, question. The parts, and the newlines between them, are
encoded separately. The filler is a repeated text, cut so that the sample has exactly `length` tokens. The depth is the
fraction of the filler that precedes the key.

These options give the settings from papers:

    Samba (section 3.3), evaluation    digits=5 depth_steps=11, with five keys for each depth: 55 samples per length
    Samba, training                    digits=5 depth_steps=0, documents with 4096 tokens
    Buitrago Ruiz & Gu (section 5.2)   trim=left end=.
    Figure 8 in that paper             trim=left end=. digits=4

In figure 8 the filler begins in mid-sentence, as with trim=left. Without a period at the answer's end, models would
repeat the key. Landmark Attention itself cuts the filler by characters and draws keys from 1 to 50000, so its samples
have different lengths.
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
MAX_DIGITS = 4_000  # Python refuses to format integers of more than 4,300 digits
MORE = 2  # number of tokens that an evaluation generates in addition to the answer's length


@dataclass(frozen=True)
class Passkey(Task):
    """Passkey retrieval: a number hidden in filler text.

    digits       how many digits the key has; the first digit is not 0
    depth_steps  sample i has depth (i mod depth_steps) / (depth_steps - 1); 0 draws depths uniformly from 0 to 1
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
            message = f"{self.name}: a length of {length} can't fit a sample, which even without filler"
            raise TaskError(f"{message} needs {length - num_filler} tokens", code="does-not-fit")
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
        """Return two metrics for a generated answer.

        `exact` is 1 if the first integer in the answer is the key, else 0. `token_exact` is 1 if the answer begins with
        exactly the expected text, else 0.
        """
        is_verbatim = answer.startswith(sample.answer)
        return {"exact": first_integer(answer, int(sample.outputs[0])), "token_exact": float(is_verbatim)}

    def chance(self) -> float:
        return 1 / (9 * 10 ** (self.digits - 1))

    def _check(self) -> None:
        if not 1 <= self.digits <= MAX_DIGITS:
            raise TaskError(f"{self.name}: digits={self.digits}: must be from 1 to {MAX_DIGITS:,}", code="out-of-range")
        if self.trim not in TRIMS:
            raise TaskError(f"{self.name}: trim={self.trim}: must be {' or '.join(TRIMS)}", code="unknown-name")


def depth_of(index: int, steps: int, random: Random) -> float:
    """Return a sample's depth, from 0 (the filler's start) to 1 (the filler's end).

    steps: number of evenly spaced depths, which consecutive samples use in turn; 0 for a random depth

    Raises TaskError if `steps` is 1.
    """
    if steps == 0:
        return random.random()
    if steps < 2:
        raise TaskError(f"depth_steps={steps}: must be at least 2, or 0 for random depths", code="out-of-range")
    return index % steps / (steps - 1)


def tiled(tokenizer: TextTokens, count: int) -> list[int]:
    """Return `count` tokens from the filler text, repeated with spaces in between."""
    tokens = tokenizer.encode(FILLER)
    repeated = tokenizer.encode(f" {FILLER}")
    while len(tokens) < count:
        tokens += repeated
    return tokens[:count]


def prefix_filler(tokenizer: TextTokens, count: int, trim: str) -> list[int]:
    """Return `count` tokens of the filler before the key, cut on the left or right (`trim`).

    With trim="left" the filler ends with a complete sentence.
    """
    if trim == "right" or count == 0:
        return tiled(tokenizer, count)
    first = tokenizer.encode(FILLER)
    repeated = tokenizer.encode(f" {FILLER}")
    units = max(0, -(-(count - len(first)) // len(repeated)))
    return [*first, *(repeated * units)][-count:]
