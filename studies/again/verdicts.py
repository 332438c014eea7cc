"""Claims that the experiments decide, by the judge of all studies; rules.md has the rules, older than the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridtron.sweep.grid import SEED
from studies.again.length_parts import CONFIRMED, MAMBA_CONTEXT, rise_of
from studies.joint_recall.order import CLAIMS as RECALLED
from studies.joint_recall.order import recalls_more
from studies.joint_recall.runs import FIRST_SEED, RATE
from studies.judge import Check, Said, Seeds, Verdict, below, decided, fails, if_failing, within
from studies.papers.claim import Kept
from studies.papers.hax import finds_more, lower_loss
from studies.papers.length_views import FAILS, FLOOR, Rise, parts_of, remembrance, rises, rises_less
from studies.span_study.asked import readings_of
from studies.span_study.claims import CLAIMS as OF_SPANS
from studies.span_study.claims import FULL, scores, verdict
from studies.study import Measured

COPIES = 0.5  # share of them below which a model fails to copy
LOW_RANKS = (2, 4)
MODES = ("zero", "random", "fitted", "passing", "tbtt")
OF_BASE = "{}-500"  # names of models after an intervention
OF_MAMBA = "mamba-{}-1000"


@dataclass(frozen=True)
class Claim:
    """A claim with the variants of a sweep that it compares; `judge` decides it from their results."""

    says: str
    part: str
    variants: tuple[str, ...]
    judge: Callable[[Kept], Verdict]


def judged(claim: Claim, kept: Kept) -> Verdict:
    """Judge a claim; it waits while results are missing."""
    if missing := kept.missing({claim.part: claim.variants}):
        return Verdict(Said.WAITS, f"no result yet of {', '.join(missing)}")
    return claim.judge(kept)


def of_longest(copied: Mapping[str, float]) -> float:
    """Return the share of letters that were copied of the longest tested string."""
    return copied[max(copied, key=int)]


def of_copying() -> Iterator[Claim]:
    def judge(kept: Kept) -> Verdict:
        zero = kept.by_seed("copying", "zero", of_longest)
        passing = kept.by_seed("copying", "passing", of_longest)
        letters = "letters of the longest tested strings"
        failure = within(f"{letters}, from zero states below {COPIES}", zero, high=COPIES)
        return if_failing([failure], [below(f"{letters}, zero states below passing", zero, passing)])

    yield Claim("Table 1: passed states copy longer strings", "copying", ("zero", "passing"), judge)


def of_spans() -> Iterator[Claim]:
    def recalls(kept: Kept) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for run, result in kept.measured["span"]:
            found.setdefault(run.variant, {})[run.values[SEED]] = readings_of(result.measured)
        return found

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
        failure = within("perplexity on text rises", rise, low=math.log(FAILS), ratio=True)
        return if_failing([failure], [below("keys in the longest rows, zero states below fitted", zero, fitted)])

    yield Claim(
        "Length, Figure 7: tuned from fitted noise, a model finds keys in longer texts", "passkey", names, judge
    )


def of_recall() -> Iterator[Claim]:
    for above, below_it in RECALLED:

        def judge(kept: Kept, above: str = above, below_it: str = below_it) -> Verdict:
            return recalls_more(above, below_it, accuracies(kept.measured))

        yield Claim(f"HAX, Table 5: {above} above {below_it}", "rates", (above, below_it), judge)


def accuracies(measured: Measured) -> dict[str, Seeds]:
    """Return accuracies in percent, by model and seed, at the rate that was best with the first seed."""
    first: dict[str, tuple[float, str]] = {}
    for run, result in measured["rates"]:
        first[run.variant] = max(first.get(run.variant, (0.0, "")), (result.measured, run.values[RATE]))
    found: dict[str, Seeds] = {name: {FIRST_SEED: 100 * best} for name, (best, _) in first.items()}
    for run, result in (*measured["seeds"], *measured["more"]):
        found[run.variant] = {**found.get(run.variant, {}), run.values[SEED]: 100 * result.measured}
    return found


def of_length(context: int) -> Iterator[Claim]:
    """Yield the claims of the length paper's figures; `context` is that of the setting that the trial found."""
    of = partial(Claim, part=CONFIRMED)
    ours = rise_of(context)
    mamba = rise_of(MAMBA_CONTEXT)
    for name, rise, mode in (("base", ours, OF_BASE), ("mamba", mamba, OF_MAMBA)):
        states = tuple(mode.format(state) for state in MODES)
        repairs = tuple(mode.format(state) for state in ("zero", "passing", "tbtt"))
        yield of(f"Figure 2: {name} fails beyond its context", variants=(name,), judge=partial(_fails, name, rise))
        yield of(
            f"Figures 1, 5: passing and TBTT repair {name}", variants=repairs, judge=partial(_repaired, mode, rise)
        )
        yield of(f"Figure 5: order of interventions, {name}", variants=states, judge=partial(_ordered, mode, rise))
        yield of(f"Figure 3: {name} fails with more training", variants=(name,), judge=partial(_trained, name, rise))
    contexts = ("context-half", "base", "context-double")
    yield of("Figure 2: longer contexts are better", variants=contexts, judge=partial(_contexts, context))
    yield of("Figure 11: a longer warm-up is worse", variants=("base", "warmup-25"), judge=partial(_warmup, ours))
    sigmas = ("zero-100", "sigma-0.3", "sigma-3")
    yield of("Figure 12: random states need a suitable deviation", variants=sigmas, judge=partial(_sigmas, ours))
    pair = ("base", "passing-500")
    yield of("Figure 1: passing lets far tokens move answers less", variants=pair, judge=_remembers_less)
    yield of("Figure 4: after passing, states grow less", variants=pair, judge=partial(_grows_less, ours))


def failure(kept: Kept, variant: str, rise: Rise) -> Check:
    return within(f"{variant} fails at {rise.at}x", rises(kept, variant, rise), low=math.log(FAILS), ratio=True)


def _fails(name: str, rise: Rise, kept: Kept) -> Verdict:
    return fails(failure(kept, name, rise))


def _repaired(mode: str, rise: Rise, kept: Kept) -> Verdict:
    """Judge the repair: level far beyond the context, with a rise and a perplexity below those from zero states."""
    zero = mode.format("zero")
    checks = []
    for state in ("passing", "tbtt"):
        variant = mode.format(state)
        checks.append(within(f"{variant} level", rises(kept, variant, rise), high=math.log(FAILS), ratio=True))
        checks += rises_less(kept, variant, zero, rise)
    return if_failing([failure(kept, zero, rise)], checks)


def _ordered(mode: str, rise: Rise, kept: Kept) -> Verdict:
    pairs = (("passing", "fitted"), ("fitted", "random"), ("passing", "zero"), ("tbtt", "zero"))
    checks = [check for less, more in pairs for check in rises_less(kept, mode.format(less), mode.format(more), rise)]
    return if_failing([failure(kept, mode.format("zero"), rise)], checks)


def _trained(name: str, rise: Rise, kept: Kept) -> Verdict:
    early = kept.by_seed(rise.sweep, name, lambda found: rise.of(parts_of(found)[0]))
    less = below("rise after 2.5x below 20x", early, rises(kept, name, rise), one_start=True, ratio=True)
    return if_failing([failure(kept, name, rise)], [less])


def _contexts(context: int, kept: Kept) -> Verdict:
    by_name = {"context-half": context // 2, "base": context, "context-double": 2 * context}
    rise = {name: rises(kept, name, rise_of(length)) for name, length in by_name.items()}
    shorter = [failure(kept, name, rise_of(by_name[name])) for name in ("context-half", "base")]
    pairs = (("context-double", "base"), ("base", "context-half"))
    return if_failing(
        shorter, [below(f"rise, {less} below {more}", rise[less], rise[more], ratio=True) for less, more in pairs]
    )


def _warmup(rise: Rise, kept: Kept) -> Verdict:
    less = below("rise, 10% below 25%", rises(kept, "base", rise), rises(kept, "warmup-25", rise), ratio=True)
    return if_failing([failure(kept, name, rise) for name in ("base", "warmup-25")], [less])


def _sigmas(rise: Rise, kept: Kept) -> Verdict:
    suitable = rises_less(kept, "sigma-0.3", "zero-100", rise)
    too_large = rises_less(kept, "zero-100", "sigma-3", rise)
    return if_failing([failure(kept, "zero-100", rise)], [*suitable, *too_large])


def _remembers_less(kept: Kept) -> Verdict:
    base, passing = (
        kept.by_seed(CONFIRMED, name, lambda found: math.log(remembrance(found))) for name in ("base", "passing-500")
    )
    floor = within(f"base remembers, above {FLOOR:g}", base, low=math.log(FLOOR), ratio=True)
    return if_failing([floor], [below("passing below base", passing, base, one_start=True, ratio=True)])


def _grows_less(rise: Rise, kept: Kept) -> Verdict:
    base, passing = (kept.by_seed(CONFIRMED, name, _growth) for name in ("base", "passing-500"))
    less = below("growth of states, passing below base", passing, base, one_start=True, ratio=True)
    return if_failing([failure(kept, "base", rise)], [less])


def _growth(found: Mapping[str, Any]) -> float:
    """Return the logarithm of a state's last deviation over its first."""
    (_, first), *_, (_, last) = found["deviations"]
    return math.log(last / first)
