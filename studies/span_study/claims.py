"""The paper's statements about its variants, and the rules by which a run of this study agrees with them.

The statistic was fixed before the runs. It is recall over all answers in rows of 512, 1024 and 2048 tokens, the tuned
length and 2 and 4 times that, read with full attention as in the paper. Models are compared from the same base, seed by
seed. One model stands above another if its mean is 2 points higher and no seed says otherwise; two are level if their
means are within 5 points. A variant with one seed is judged by that one. Perplexities count as equal within 10%, and
times of steps within 20%, at the longest timed rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hybridtron.architecture.attention import ReadingAttention
from studies.long_text import YES_OR_NO
from studies.span_study.asked import LENGTHS, Readings
from studies.span_study.cost import Costs, ratio

ABOVE = 0.02
LEVEL = 0.05
SAME_PERPLEXITY = 1.1
SAME_TIME = 1.2
SCORED = (512, 1024, 2048)
FULL = ReadingAttention.full
TRAINED = ReadingAttention.trained
Found = Mapping[str, Mapping[str, Readings]]
"""Readings by variant and seed."""
COLUMNS = ("figure", "what the paper says", "ours (by seed)", "agrees")


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


def differences(found: Found, claim: Claim) -> list[float]:
    """Return the first model's score minus the other's, for each seed that both have."""
    ours = found.get(claim.first, {})
    theirs = found.get(claim.second, {})
    our_reading, their_reading = claim.reads
    return [score(ours[seed], our_reading) - score(theirs[seed], their_reading) for seed in ours if seed in theirs]


def agrees(claim: Claim, by: list[float]) -> bool:
    """Return True if these differences by seed agree with the claim."""
    mean = statistics.mean(by)
    above = mean >= ABOVE and min(by) > 0
    return {"above": above, "not_above": not above, "level": abs(mean) <= LEVEL}[claim.kind]


def judged(found: Found, costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table: each claim about models that have been trained."""
    for claim in CLAIMS:
        if by := differences(found, claim):
            gaps = ", ".join(f"{100 * gap:+.1f}" for gap in by)
            ours = f"{100 * statistics.mean(by):+.1f} points ({gaps})"
            yield claim.figure, claim.says, ours, YES_OR_NO[agrees(claim, by)]
    yield from _perplexities(found)
    yield from _times(costs)


def _perplexities(found: Found) -> Iterator[tuple[str, ...]]:
    """Yield the rows for Tables 2 and 3."""
    far = {name: _perplexity(found[name], TRAINED, max(LENGTHS)) for name in ATTENTIONS if name in found}
    if "SW" in far and len(far) > 1 and not any(map(math.isnan, far.values())):
        says = "read as trained at 4 times the tuned length, SW has the lowest perplexity"
        yield "Table 2", says, _listed(far), YES_OR_NO[min(far, key=far.__getitem__) == "SW"]
    near = {name: _perplexity(found[name], FULL, min(SCORED)) for name in ADAPTERS if name in found}
    if len(near) == len(ADAPTERS):
        says = "HyLoRA, LoRA+ and LoRA have the same perplexity at the tuned length"
        yield "Table 3", says, _listed(near), YES_OR_NO[max(near.values()) <= SAME_PERPLEXITY * min(near.values())]


def _perplexity(of: Mapping[str, Readings], how: ReadingAttention, length: int) -> float:
    """Return the mean perplexity over seeds; NaN if rows of that length were not measured."""
    perplexities = [readings[how][length].perplexity for readings in of.values() if length in readings[how]]
    if not perplexities:
        return math.nan
    return statistics.mean(perplexities)


def _times(costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield the rows for Figure 4."""
    shortest = costs[min(costs)]
    longest = costs[max(costs)]
    if not {"full", "SW", "S2", "SE"} <= longest.keys():
        return
    ours = ratio(longest, "SE", "SW")
    yield "4", f"steps with SE as fast as with SW, at {max(costs)} tokens", f"{ours:.2f}x", YES_OR_NO[ours <= SAME_TIME]
    for slow in ("full", "S2"):
        first, last = (ratio(of, slow, "SE") for of in (shortest, longest))
        says = f"{slow} slower than SE, and the more the longer the rows"
        yield "4", says, f"{first:.2f}x at {min(costs)}, {last:.2f}x at {max(costs)}", YES_OR_NO[last > max(first, 1.0)]


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())
