"""Multi-query associative recall (MQAR; Arora et al. 2023), as token ids.

A sample with L tokens begins with k pairs, each a key and its value. The remaining tokens form slots with two tokens
each. Each key occurs once more, as the first token of a slot. The keys' slots are drawn without replacement. The weight
of slot i, counted from 1, is a * i^(a - 1), so that early slots, and thus short gaps, are likely. The target at a key's
second occurrence is the key's value. The token after this second occurrence usually differs from the target, so samples
have explicit labels. Positions without a key or value hold random ids, or 0.

With `follows` the value is also the second token of the key's slot. Then the target is the next token, as training on
a prepared folder requires.

Keys are drawn from 1 to V/2 - 1 and values from V/2 to V - 1, both without replacement. The paper's sizes (L, k) are
(64, 4), (128, 8), (256, 16), (512, 64). A model with one state-space layer cannot solve the task without a convolution
before the layer, because the model must associate each value with its key, the token before the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from random import Random

from hybridtron.problems import Code
from hybridtron.tasks.base import IGNORED, Sample, TaskError, TextTokens, TokenTask

# Bounds of the option `power`. Within them, i ** (power - 1) and its reciprocal are finite for every slot i
MIN_POWER = 1e-6
MAX_POWER = 32


@dataclass(frozen=True)
class MultiQueryRecall(TokenTask):
    """The MQAR task.

    pairs        k, the number of keys
    vocabulary   V, the number of ids for keys and values
    power        a, the exponent in the distribution of gaps, from 1e-6 to 32
    random_rest  fill positions without a key or value with random ids (else with 0)
    noise        number of additional ids, from which `random_rest` draws; if 0, `random_rest` draws from all V ids
    follows      at the key's second occurrence, put the value after the key again, so that targets are next tokens
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
        """Return a random slot for each key, drawn without replacement; slots are counted from 0.

        If u is uniform from 0 to 1, -log(u) / weight is an exponential variable with the rate `weight`. Each slot gets
        such a variable. The probability that a slot has the smallest variable is proportional to its weight, and
        exponential variables are memoryless. So the slots with the k smallest variables are k weighted draws without
        replacement.
        """
        num_slots = (length - 2 * self.pairs) // 2
        waits = [-log(1 - random.random()) / (self.power * i ** (self.power - 1)) for i in range(1, num_slots + 1)]
        return sorted(range(num_slots), key=waits.__getitem__)[: self.pairs]

    def _check(self, length: int) -> None:
        checks: list[tuple[object, Code, str]] = [
            (length % 2, "not-divisible", f"a length of {length} is odd; choose an even length"),
            (self.pairs < 1, "out-of-range", f"pairs={self.pairs}: must be at least 1"),
            (self.noise < 0, "out-of-range", f"noise={self.noise}: must be at least 0"),
            (self.noise and not self.random_rest, "needs-other-key", f"noise={self.noise}: needs random_rest=true"),
            (
                not MIN_POWER <= self.power <= MAX_POWER,  # also true of nan
                "out-of-range",
                f"power={self.power}: must be from {MIN_POWER:g} to {MAX_POWER} (default: 0.01)",
            ),
            (
                4 * self.pairs > length,
                "does-not-fit",
                f"a length of {length} can't fit pairs={self.pairs}, which need {4 * self.pairs} tokens",
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
