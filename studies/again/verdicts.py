"""Claims that the experiments decide, by the judge of all studies; rules.md has the rules, older than the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridtron.sweep.grid import SEED
from studies.again.length_parts import CONFIRMED, MAMBA_CONTEXT, context_of, rise_of
from studies.again.parts import RECALL
from studies.joint_recall.order import CLAIMS as RECALLED
from studies.joint_recall.order import recalls_more
from studies.joint_recall.runs import MORE
from studies.judge import Said, Seeds, Verdict, below, decided, if_failing, within
from studies.papers.claim import Kept
from studies.papers.hax import finds_more, lower_loss
from studies.papers.length_views import (
    FAILS,
    fails,
    failure,
    more_training,
    ordered,
    remembers_less,
    repairs,
    rises,
    steadier,
)
from studies.span_study.asked import readings_of
from studies.span_study.claims import CLAIMS as OF_SPANS
from studies.span_study.claims import FULL, scores, verdict
from studies.study import Measured, Plan

COPIES = 0.5  # share of them below which a model fails to copy
LOW_RANKS = (2, 4)
MODES = ("zero", "random", "fitted", "passing", "tbtt")
ORDER = (("passing", "fitted"), ("fitted", "random"), ("passing", "zero"), ("tbtt", "zero"))  # each below the other
OF_BASE = "{}-500"  # names of models after an intervention, with the number of steps that decides
OF_MAMBA = "mamba-{}-1000"


@dataclass(frozen=True)
class Claim:
    """A claim with the variants of a sweep that it compares; `judge` decides it from their results."""

    says: str
    part: str
    variants: tuple[str, ...]
    judge: Callable[[Kept], Verdict]


def judged(claim: Claim, measured: Measured, plan: Plan) -> Verdict:
    """Judge a claim; it waits until every planned run of its variants has a result."""
    if missing := [name for variant in claim.variants for name in missing_of(claim.part, variant, measured, plan)]:
        return Verdict(Said.WAITS, f"no result yet of {', '.join(missing)}")
    return claim.judge(Kept(measured, {}))


def missing_of(part: str, variant: str, measured: Measured, plan: Plan) -> list[str]:
    """Name the planned runs of a variant that have no result, or a variant without planned runs."""
    planned = [run.name for run in plan[part].sweep.runs if run.variant == variant]
    if not planned:
        return [variant]
    finished = {run.name for run, _ in measured.get(part, ())}
    return [name for name in planned if name not in finished]


def with_earlier(claim: Claim, measured: Measured, before: Measured) -> Verdict:
    """Judge a claim by new and earlier seeds together, which decides nothing."""
    together = [*before.get(claim.part, ()), *measured[claim.part]]
    return claim.judge(Kept({claim.part: together}, {}))


def of_longest(copied: Mapping[str, float]) -> float:
    """Return the share of letters that were copied of the longest tested string."""
    return copied[max(copied, key=int)]


def of_copying() -> Iterator[Claim]:
    def judge(kept: Kept) -> Verdict:
        zero = kept.by_seed("copying", "zero", of_longest)
        passing = kept.by_seed("copying", "passing", of_longest)
        letters = "letters of the longest tested strings"
        few = within(f"{letters}, from zero states below {COPIES}", zero, high=COPIES)
        return if_failing([few], [below(f"{letters}, zero states below passing", zero, passing)])

    yield Claim("Table 1: passed states copy longer strings", "copying", ("zero", "passing"), judge)


def of_spans() -> Iterator[Claim]:
    def recalls(kept: Kept) -> dict[str, dict[str, Any]]:
        by_variant: dict[str, dict[str, Any]] = {}
        for run, result in kept.measured["span"]:
            by_variant.setdefault(run.variant, {})[run.values[SEED]] = readings_of(result.measured)
        return by_variant

    for claim in OF_SPANS:

        def judge(kept: Kept, claim: Any = claim) -> Verdict:
            return verdict(recalls(kept), claim) or Verdict(Said.WAITS, "no seed in common")

        yield Claim(f"Figure {claim.figure}: {claim.says}", "span", (claim.first, claim.second), judge)
    for rank in LOW_RANKS:
        names = (f"lora-rank={rank}", f"rank={rank}")

        def ranked(kept: Kept, names: tuple[str, str] = names) -> Verdict:
            lora, hylora = (scores(recalls(kept), name, FULL) for name in names)
            return decided([below("points, LoRA below HyLoRA", lora, hylora, one_start=True)])

        yield Claim(f"Figure 2(b): SE with HyLoRA above LoRA, at rank {rank}", "span", names, ranked)


def of_grown() -> Iterator[Claim]:
    tuned = ("mamba-needles", "hax-needles")
    yield Claim("HAX, Table 1: grown and tuned, HAX finds more keys", "grown", tuned, finds_more)
    yield Claim("HAX, Figure 4: continued, HAX has a lower held-out loss", "grown", ("mamba", "hax"), lower_loss)


def of_keys() -> Iterator[Claim]:
    """Yield the claim about keys in the longest rows, of a model whose perplexity rises beyond its context."""
    names = ("mamba", "mamba_fitted")

    def judge(kept: Kept) -> Verdict:
        zero, fitted = (kept.by_seed("passkey", name, lambda found: found["last"][-1]["value"]) for name in names)
        rise = kept.by_seed("passkey", "mamba", lambda found: math.log(found["rise"]))
        risen = within("perplexity on text rises", rise, low=math.log(FAILS), ratio=True)
        says = "keys in the longest rows, zero states below fitted"
        return if_failing([risen], [below(says, zero, fitted, one_start=True)])

    yield Claim(
        "Length, Figure 7: tuned from fitted noise, a model finds keys in longer texts", "passkey", names, judge
    )


def of_recall() -> Iterator[Claim]:
    """Yield the claims about two models that both have new seeds."""
    for better, worse in RECALLED:
        if better in MORE and worse in MORE:

            def judge(kept: Kept, better: str = better, worse: str = worse) -> Verdict:
                return recalls_more(better, worse, {name: accuracies(kept, name) for name in (better, worse)})

            yield Claim(f"HAX, Table 5: {better} above {worse}", RECALL, (better, worse), judge)


def accuracies(kept: Kept, variant: str) -> Seeds:
    """Return a variant's accuracy in percent, by seed."""
    return kept.by_seed(RECALL, variant, lambda accuracy: 100 * accuracy)


def of_length(context: int) -> Iterator[Claim]:
    """Yield the claims of the length paper's figures; `context` is that of the setting that the trial found."""
    claim = partial(Claim, part=CONFIRMED)
    rise_of_base = rise_of(context)
    of_models = (("base", rise_of_base, OF_BASE), ("mamba", rise_of(MAMBA_CONTEXT), OF_MAMBA))
    for name, rise, pattern in of_models:
        states = {state: pattern.format(state) for state in MODES}
        yield claim(f"Figure 2: {name} fails beyond its context", variants=(name,), judge=fails(name, rise))
        repaired = (states["passing"], states["tbtt"])
        yield claim(
            f"Figures 1, 5: passing and TBTT repair {name}",
            variants=(states["zero"], *repaired),
            judge=repairs(repaired, states["zero"], rise),
        )
        pairs = [(states[less], states[more]) for less, more in ORDER]
        yield claim(
            f"Figure 5: order of interventions, {name}",
            variants=tuple(states.values()),
            judge=ordered((states["zero"],), *pairs, rise=rise),
        )
        yield claim(f"Figure 3: {name} fails with more training", variants=(name,), judge=more_training(name, rise))
    contexts = ("context-half", "base", "context-double")
    yield claim("Figure 2: longer contexts are better", variants=contexts, judge=partial(_contexts, context))
    warmups = ("base", "warmup-25")
    longer = ordered(warmups, warmups, tuned=False, rise=rise_of_base)
    yield claim("Figure 11: a longer warm-up is worse", variants=warmups, judge=longer)
    suitable = ordered(("zero-100",), ("sigma-0.3", "zero-100"), ("zero-100", "sigma-3"), rise=rise_of_base)
    sigmas = ("zero-100", "sigma-0.3", "sigma-3")
    yield claim("Figure 12: random states need a suitable deviation", variants=sigmas, judge=suitable)
    passing = OF_BASE.format("passing")
    remembers = remembers_less(passing, rise_of_base)
    yield claim("Figure 1: passing lets far tokens move answers less", variants=("base", passing), judge=remembers)
    states_grow = steadier(passing, rise_of_base)
    yield claim("Figure 4: after passing, states grow less", variants=("base", passing), judge=states_grow)


def _contexts(context: int, kept: Kept) -> Verdict:
    """Judge three contexts, each model by the rise at multiples of its own."""
    by_name = {name: rise_of(context_of(name, context)) for name in ("context-half", "base", "context-double")}
    rise = {name: rises(kept, name, own) for name, own in by_name.items()}
    pairs = (("context-double", "base"), ("base", "context-half"))
    return if_failing(
        [failure(kept, name, own) for name, own in by_name.items()],
        [below(f"rise, {less} below {more}", rise[less], rise[more], ratio=True) for less, more in pairs],
    )
