"""The paper's statements about its variants, and the rules by which runs of this study agree with them.

What is compared was fixed before the runs: recall over all answers in rows of 512, 1024 and 2048 tokens, the tuned
length and 2 and 4 times that, read with full attention as in the paper. Models are compared seed by seed, as those of a
seed are tuned from one base, and decided by the judge of all studies. Two models are level if they are within 5 points.
Perplexities count as equal within 10%, and times of steps within 20%, at the longest timed rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from hybridtron.architecture.attention import ReadingAttention
from studies.judge import Check, Seeds, Verdict, below, decided, differing
from studies.judge import timed as judge_times
from studies.span_study.asked import LENGTHS, Readings
from studies.span_study.cost import Costs, ratio

NOT_ABOVE = 2.0  # points of recall by which a model may stand above another that it is said not to be above
LEVEL = 5.0
SAME_PERPLEXITY = 1.1
SAME_TIME = 1.2
SCORED = (512, 1024, 2048)
FULL = ReadingAttention.full
TRAINED = ReadingAttention.trained
Found = Mapping[str, Mapping[str, Readings]]
"""Readings by variant and seed."""
COLUMNS = ("figure", "what the paper says", "ours: differences by seed, mean and interval", "verdict")


@dataclass(frozen=True)
class Claim:
    """A comparison of two models, each read with an attention of `reads`.

    Its `kind` is `above` (the first stands above the other), `not_above`, or `level`.
    """

    figure: str
    says: str
    first: str
    second: str
    kind: str = "above"
    reads: tuple[ReadingAttention, ReadingAttention] = (FULL, FULL)


CLAIMS = (
    Claim("2(a)", "SE above SW", "SE", "SW"),
    Claim("2(a)", "SE above S2", "SE", "S2"),
    Claim("2(a)", "SE level with full attention", "SE", "full", kind="level"),
    Claim("2(b)", "SE with HyLoRA above LoRA", "SE", "SE-lora"),
    Claim("2(b)", "SE with HyLoRA above LoRA+", "SE", "SE-lora_plus"),
    Claim("3(a)", "SE above random blocks", "SE", "random"),
    Claim("3(a)", "random blocks above none", "random", "NoMem"),
    Claim("3(b)", "chunks that are drawn above 128", "SE", "chunk=128"),
    Claim("3(b)", "chunks that are drawn above 256", "SE", "chunk=256"),
    Claim("3(c)", "2 blocks of 8 above 8 blocks of 2", "2x8", "8x2"),
    Claim("5", "full attention with HyLoRA above LoRA", "full", "full-lora"),
    Claim("5", "full attention with HyLoRA above LoRA+", "full", "full-lora_plus"),
    Claim("6", "rank 16 above rank 4", "rank=16", "rank=4"),
    Claim("6", "rank 64 above rank 16", "rank=64", "rank=16"),
    Claim("11(a)", "SW read with full attention above its own", "SW", "SW", reads=(FULL, TRAINED)),
    Claim("11(b)", "SE read with full attention above its own", "SE", "SE", reads=(FULL, TRAINED)),
    Claim("12", "SE above landmarks", "SE", "LM"),
    Claim("13", "S2 at the rate of the others not above S2 at a tenth of it", "S2", "S2-lr=2e-4", kind="not_above"),
)
"""All claims but Figure 3(d), the number of retrieved tokens, which this study does not test."""
ADAPTERS = ("SE", "SE-lora_plus", "SE-lora")
ATTENTIONS = ("SW", "full", "S2", "SE")


def score(readings: Readings, how: ReadingAttention = FULL) -> float:
    """Return the statistic of one run: its recall over all answers at the scored lengths."""
    scored = [readings[how][length] for length in SCORED if length in readings[how]]
    return sum(sum(answers.right) for answers in scored) / sum(sum(answers.asked) for answers in scored)


def scores(found: Found, variant: str, how: ReadingAttention) -> Seeds:
    """Return a model's recall in percent, by seed."""
    return {seed: 100 * score(readings, how) for seed, readings in found.get(variant, {}).items()}


def verdict(found: Found, claim: Claim) -> Verdict | None:
    """Judge a claim; None if no seed has both models."""
    first, second = (
        scores(found, name, how) for name, how in zip((claim.first, claim.second), claim.reads, strict=True)
    )
    by_seed = [first[seed] - second[seed] for seed in first if seed in second]
    if not by_seed:
        return None
    points = ", ".join(f"{value:+.1f}" for value in by_seed)
    low, high = RANGES[claim.kind]
    return decided([differing(f"points by seed {points}", second, first, low=low, high=high, one_start=True)])


RANGES = {"above": (0.0, math.inf), "not_above": (-math.inf, NOT_ABOVE), "level": (-LEVEL, LEVEL)}
"""The range in which each kind of claim has the first model's recall minus the second's, in points."""


def judged(found: Found, costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table: each claim about models that have been trained."""
    for claim in CLAIMS:
        if of_claim := verdict(found, claim):
            yield claim.figure, claim.says, of_claim.numbers, of_claim.said.value
    yield from _perplexities(found)
    yield from _times(costs)


def _perplexities(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the rows for Tables 2 and 3."""
    far = {name: _perplexity(found[name], TRAINED, max(LENGTHS)) for name in ATTENTIONS if name in found}
    others = [name for name in far if name != "SW"]
    if far.get("SW") and others and all(far.values()):
        says = "read as trained at 4 times the tuned length, SW has the lowest perplexity"
        lower = [below(f"SW below {name}", far["SW"], far[name], one_start=True, ratio=True) for name in others]
        yield _row("Table 2", says, lower)
    near = {name: _perplexity(found[name], FULL, min(SCORED)) for name in ADAPTERS if name in found}
    if len(near) == len(ADAPTERS):
        says = "HyLoRA, LoRA+ and LoRA have the same perplexity at the tuned length"
        reach = math.log(SAME_PERPLEXITY)
        equal = [
            differing(f"{one} and {two}", near[one], near[two], low=-reach, high=reach, one_start=True, ratio=True)
            for one, two in combinations(ADAPTERS, 2)
        ]
        yield _row("Table 3", says, equal)


def _row(where: str, says: str, checks: list[Check]) -> tuple[str, ...]:
    of_claim = decided(checks)
    return where, says, of_claim.numbers, of_claim.said.value


def _perplexity(of: Mapping[str, Readings], how: ReadingAttention, length: int) -> Seeds:
    """Return the logarithm of perplexity by seed; without the seeds whose rows of that length were not measured."""
    return {
        seed: math.log(readings[how][length].perplexity) for seed, readings in of.items() if length in readings[how]
    }


def _times(costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield the rows for Figure 4: ratios of times, which have no seeds."""
    shortest = costs[min(costs)]
    longest = costs[max(costs)]
    if not {"full", "SW", "S2", "SE"} <= longest.keys():
        return
    ours = ratio(longest, "SE", "SW")
    as_fast = judge_times([(f"{ours:.2f}x", ours <= SAME_TIME)])
    yield "4", f"steps with SE as fast as with SW, at {max(costs)} tokens", as_fast.numbers, as_fast.said.value
    for slow in ("full", "S2"):
        first, last = (ratio(of, slow, "SE") for of in (shortest, longest))
        shown = f"{first:.2f}x at {min(costs)}, {last:.2f}x at {max(costs)}"
        slower = judge_times([(shown, last > max(first, 1.0))])
        yield "4", f"{slow} slower than SE, and the more the longer the rows", slower.numbers, slower.said.value
