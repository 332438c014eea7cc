"""Multi-query associative recall (MQAR; Arora et al. 2023), as token ids.

A row of L tokens starts with k pairs of key and value. The rest is two-token slots. Each key occurs once more, as
the first token of a slot; slot i is chosen with a probability in proportion to a * i^(a - 1), without replacement, so
short gaps are likely. The target at that position is the key's value. It is not the next token, so samples have labels.
All other positions hold random ids (or 0). With `follows` the value is the second token of the slot: then the target is
the next token, as training on prepared tokens requires.

Keys are from 1 to V/2 - 1, values from V/2 to V - 1, both without replacement. The paper's sizes (L, k): (64, 4),
(128, 8), (256, 16), (512, 64). A state-space layer needs a convolution or a second layer to bind value to key.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from random import Random

from hybridtron.problems import Code
from hybridtron.tasks.base import IGNORED, Sample, TaskError, TextTokens, TokenTask

# Bounds of `power`: with these, i ** (power - 1) and its reciprocal are finite for every slot i.
SMALLEST_POWER = 1e-6
LARGEST_POWER = 32


@dataclass(frozen=True)
class MultiQueryRecall(TokenTask):
    """The MQAR task.

    pairs        k, how many keys a row has
    vocabulary   V
    power        a, the exponent in the distribution of gaps, from 1e-6 to 32
    random_rest  fill other positions with random ids, not with 0
    noise        additional ids from which these are drawn; 0: they are drawn from all V ids, keys included
    follows      put the value after its key also the second time, so that targets are next tokens
    """

    name: str = "mqar"
    pairs: int = 4
    vocabulary: int = 8192
    power: float = 0.01
    random_rest: bool = True
    noise: int = 0
    follows: bool = False

    @property
    def about(self) -> str:
        return f"multi-query associative recall of {self.pairs} pairs (token ids)"

    @property
    def num_tokens(self) -> int:
        return self.vocabulary + self.noise

    def sample(self, seed: int, index: int, tokenizer: TextTokens, length: int) -> Sample:
        self._check(length)
        random = self.random(seed, index)
        half = self.vocabulary // 2
        keys = random.sample(range(1, half), self.pairs)
        values = random.sample(range(half, self.vocabulary), self.pairs)
        slots = self._slots(random, length)
        places = [2 * self.pairs + 2 * slot for slot in slots]
        pairs_by_place = dict(zip(places, zip(keys, values, strict=True), strict=True))
        tokens = [token for pair in zip(keys, values, strict=True) for token in pair]
        labels = [IGNORED] * length
        if self.noise:
            fillers = range(self.vocabulary, self.num_tokens)
        else:
            fillers = range(self.vocabulary)
        for place in range(len(tokens), length):
            if self.random_rest:
                filler_id = random.choice(fillers)
            else:
                filler_id = 0
            key, labels[place] = pairs_by_place.get(place, (filler_id, IGNORED))
            tokens.append(key)
        answer = [labels[place] for place in sorted(places)]
        mask = [int(label != IGNORED) for label in labels]
        if self.follows:
            mask = [0, *mask[:-1]]
            for place, (_, value) in pairs_by_place.items():
                tokens[place + 1] = value
        return Sample(
            self.name,
            seed,
            index,
            " ".join(map(str, tokens)),
            " ".join(map(str, answer)),
            tuple(tokens),
            tuple(mask),
            tuple(map(str, answer)),
            generate=0,
            max_length=length,
            meta={"keys": keys, "values": values, "places": places},
            labels=None if self.follows else tuple(labels),
        )

    def _slots(self, random: Random, length: int) -> list[int]:
        """Draw a slot for each key, counted from 0, without replacement.

        The k smallest values -log(u) / weight are distributed like k weighted draws without replacement: the minimum of
        exponential variables is the i-th with a probability in proportion to its rate, and they are memoryless.
        """
        num_slots = (length - 2 * self.pairs) // 2
        waits = [-log(1 - random.random()) / (self.power * i ** (self.power - 1)) for i in range(1, num_slots + 1)]
        return sorted(range(num_slots), key=waits.__getitem__)[: self.pairs]

    def _check(self, length: int) -> None:
        checks: list[tuple[object, Code, str]] = [
            (length % 2, "not-divisible", f"a length of {length} is odd, and slots have two tokens"),
            (self.pairs < 1, "out-of-range", f"pairs={self.pairs}: must be at least 1"),
            (self.noise < 0, "out-of-range", f"noise={self.noise}: must be at least 0"),
            (self.noise and not self.random_rest, "needs-other-key", f"noise={self.noise}: needs random_rest=true"),
            (
                not SMALLEST_POWER <= self.power <= LARGEST_POWER,  # also true of nan
                "out-of-range",
                f"power={self.power}: must be from {SMALLEST_POWER:g} to {LARGEST_POWER} (default: 0.01)",
            ),
            (
                4 * self.pairs > length,
                "does-not-fit",
                f"a length of {length} can't fit pairs={self.pairs}; it needs {4 * self.pairs}",
            ),
            (
                self.random_rest and not self.noise and self.vocabulary <= length,
                "out-of-range",
                f"vocabulary={self.vocabulary}: must be more than the length {length}, unless noise is set",
            ),
            (
                self.vocabulary // 2 <= self.pairs,
                "out-of-range",
                f"vocabulary={self.vocabulary}: must be at least {2 * self.pairs + 2} for pairs={self.pairs}",
            ),
        ]
        for is_wrong, code, message in checks:
            if is_wrong:
                raise TaskError(f"{self.name}: {message}", code=code)

    def chance(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)
