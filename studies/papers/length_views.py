"""Tables, pictures and rules for claims about perplexity and states beyond the context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.judge import Check, Seeds, Verdict, below, decided, if_failing, within
from studies.judge import fails as does_fail
from studies.long_text import Beyond, Curve, draw_seeds, frame, spread
from studies.papers.claim import Kept, Table
from studies.papers.columns import SAME_TEXT
from studies.papers.length_runs import CHINCHILLA, CONTEXT, EIGHTHS, LONGER, TIMES

FAILS = 1.01  # a model fails whose perplexity is more than this many times that of the same tokens within its context
FAILS_AT = 64  # contexts into the text
FORCED_AT = 16  # the same for the story's base, which is made to fail
FLOOR = 1e-3
"""Effective Remembrance from which tokens before the context count as remembered: far above the rounding of fp32,
which gives 1e-7 to 1e-6, and below that of models that fail."""
Judge = Callable[[Kept], Verdict]
Measures = Mapping[str, Any]


@dataclass(frozen=True)
class Rise:
    """The rise of perplexity beyond the context in a sweep's runs, as a logarithm.

    Logarithms deviate alike for all models. `over` names the perplexity in the denominator, and `at` is the number of
    contexts in the text.
    """

    sweep: str
    context: int
    at: int
    over: str
    of: Callable[[Measures], float]


def curve_of(found: Measures) -> Curve:
    return Curve(**found.get("curve", found))


def beyond_context(found: Measures) -> float:
    """Return the logarithm of a ratio: perplexity at 64 contexts over that for the same tokens within one."""
    return Beyond(Curve(**found["curve"]), Curve(**found["within"])).risen(CONTEXT * FAILS_AT)


def from_least(context: int) -> Callable[[Measures], float]:
    """Return a function that gives the logarithm of perplexity at 16 contexts over the curve's lowest.

    In level curves the lowest belongs to the easiest text.
    """

    def risen(found: Measures) -> float:
        curve = curve_of(found)
        return math.log(curve.near(context * FORCED_AT) / curve.least)

    return risen


USUAL = Rise("length", CONTEXT, FAILS_AT, SAME_TEXT, beyond_context)
FORCED = Rise("language", 32, FORCED_AT, "least", from_least(32))


def rises(kept: Kept, variant: str, rise: Rise = USUAL) -> Seeds:
    """Return the rise of a variant, by seed."""
    return kept.by_seed(rise.sweep, variant, rise.of)


def far(kept: Kept, variant: str, rise: Rise = USUAL) -> Seeds:
    """Return the logarithm of a variant's perplexity where its rise is read, by seed."""
    position = rise.context * rise.at
    return kept.by_seed(rise.sweep, variant, lambda found: math.log(curve_of(found).near(position)))


def multiple(kept: Kept, variant: str, rise: Rise = USUAL) -> float:
    """Return the mean rise of a variant over seeds, as a ratio."""
    return math.exp(statistics.mean(rises(kept, variant, rise).values()))


def failure(kept: Kept, variant: str, rise: Rise = USUAL) -> Check:
    """Return the check that a model fails far beyond its context."""
    return within(f"{variant} fails at {rise.at}x", rises(kept, variant, rise), low=math.log(FAILS), ratio=True)


def fails(name: str, rise: Rise = USUAL) -> Judge:
    """Return a judge: a model fails beyond its context."""

    def judge(kept: Kept) -> Verdict:
        return does_fail(failure(kept, name, rise))

    return judge


def why_not_failed(kept: Kept) -> str:
    """Explain a base that does not fail: by its short memory, more training, Mamba, and slow decays."""
    remembered = statistics.mean(remembrance(found) for found in kept.found("length", "base"))
    longer, mamba = (
        ", ".join(f"{math.exp(beyond_context(part)):.3f}" for part in parts_of(kept.first("length", name)))
        for name in (LONGER, "mamba")
    )
    return (
        f"at {FAILS_AT}x perplexity is {multiple(kept, 'base'):.3f} times that of {SAME_TEXT}: nothing rises, because "
        f"this model forgets. What lies three contexts back moves its answers by {remembered:.1e} (Effective "
        "Remembrance). It is trained at a rate of 1e-2, ten times the paper's highest; lower rates are to be tried. "
        f"Trained {TIMES} times as long it is {longer} times that, after 1, 2, 4 and 8 eighths. Mamba fails, and more "
        f"with more training: {mamba} times after 2.5, 5, 10 and 20 times Chinchilla's tokens, of one seed "
        "(figure3-mamba). Of a Mamba-2 whose states decay slowly from the start it is "
        f"{multiple(kept, 'base', FORCED):.2f} times the least at {FORCED_AT}x (figure5-forced)"
    )


def why_no_order(variants: Sequence[str]) -> Callable[[Kept], str]:
    """Return a function that explains a missing order: the models that do not fail can't fail less."""

    def why(kept: Kept) -> str:
        ratios = [multiple(kept, variant) for variant in variants]
        over = f"perplexity is {min(ratios):.3f} to {max(ratios):.3f} times that of {SAME_TEXT}"
        if max(ratios) > FAILS:
            return f"at {FAILS_AT}x {over}"
        return (
            f"none of these is seen to fail: at {FAILS_AT}x {over}, so that there is no order. What fails, "
            "and why these do not: figure2-fails"
        )

    return why


def why_not_repaired(kept: Kept) -> str:
    """Explain a missing repair by the story's base, which does fail."""
    zero, passing, tbtt = (multiple(kept, name, FORCED) for name in ("zero", "passing", "tbtt"))
    return (
        "where the base does not fail (figure2-fails) there is nothing to repair. Of one that is made to fail: from "
        f"zero states {zero:.2f} at {FORCED_AT}x over its least, with passing {passing:.2f}, with TBTT {tbtt:.2f} "
        "(figure5-forced)"
    )


def repairs(names: Sequence[str], zero: str = "zero", rise: Rise = USUAL) -> Judge:
    """Return a judge: from zero states a model fails far beyond the context, and the named ones do not.

    Their perplexity there must be lower too, as a ratio also falls if the model reads worse within its context.
    """

    def judge(kept: Kept) -> Verdict:
        checks = []
        for name in names:
            level = within(f"{name} level at {rise.at}x", rises(kept, name, rise), high=math.log(FAILS), ratio=True)
            checks += [level, *rises_less(kept, name, zero, rise)]
        return if_failing([failure(kept, zero, rise)], checks)

    return judge


def rises_less(kept: Kept, less: str, more: str, rise: Rise = USUAL, *, one_start: bool = True) -> list[Check]:
    """Return the checks that the first model rises less, and that its perplexity there is lower too."""
    pairs = ((rises, "rise"), (far, "perplexity"))
    return [
        below(
            f"{what} at {rise.at}x, {less} below {more}",
            of(kept, less, rise),
            of(kept, more, rise),
            one_start=one_start,
            ratio=True,
        )
        for of, what in pairs
    ]


def forced(pairs: Sequence[tuple[str, str]]) -> Judge:
    """Return a judge of the base that is made to fail, for pairs (less, more)."""

    def judge(kept: Kept) -> Verdict:
        return decided([check for less, more in pairs for check in rises_less(kept, less, more, FORCED)])

    return judge


def ordered(failing: Sequence[str], *pairs: tuple[str, str], tuned: bool = True, rise: Rise = USUAL) -> Judge:
    """Return a judge of pairs (less, more): if one of `failing` fails, the first model must rise less.

    If they are `tuned` from one base, the first model's perplexity must be lower too. Others read differently well
    within their context, so that only their rise is compared.
    """

    def judge(kept: Kept) -> Verdict:
        checks = []
        for less, more in pairs:
            smaller, lower = rises_less(kept, less, more, rise, one_start=tuned)
            checks.append(smaller)
            if tuned:
                checks.append(lower)
        return if_failing([failure(kept, name, rise) for name in failing], checks)

    return judge


def fails_and_is_repaired(name: str) -> Judge:
    """Return a judge: the base fails; after passing it rises less, and its perplexity there is lower."""

    def judge(kept: Kept) -> Verdict:
        return if_failing([failure(kept, name)], rises_less(kept, f"{name}-passing", name))

    return judge


def more_training(name: str, rise: Rise = USUAL) -> Judge:
    """Return a judge: a base fails after 20 times Chinchilla's tokens, and rises less after 2.5 times."""

    def judge(kept: Kept) -> Verdict:
        early = kept.by_seed(rise.sweep, name, lambda found: rise.of(parts_of(found)[0]))
        less = below("rise after 2.5x below 20x", early, rises(kept, name, rise), one_start=True, ratio=True)
        return if_failing([failure(kept, name, rise)], [less])

    return judge


def parts_of(found: Measures) -> list[Measures]:
    """Return a base's results after parts of its training, in order, and after all of it."""
    return [*(found["earlier"][step] for step in sorted(found["earlier"], key=int)), found]


def remembers_less(passing: str, rise: Rise = USUAL) -> Judge:
    """Return a judge: tokens far before the end move the answer less after passing, if they moved the base's."""

    def judge(kept: Kept) -> Verdict:
        before, after = (
            kept.by_seed(rise.sweep, name, lambda found: math.log(remembrance(found, rise.context)))
            for name in ("base", passing)
        )
        floor = within(f"base remembers, above {FLOOR:g}", before, low=math.log(FLOOR), ratio=True)
        return if_failing([floor], [below(f"{passing} below base", after, before, one_start=True, ratio=True)])

    return judge


def remembrance(found: Measures, context: int = CONTEXT) -> float:
    """Return the mean Effective Remembrance up to one context of four."""
    return statistics.mean(value for t, value in found["remembrance"] if 0 < t <= context)


def steadier(passing: str, rise: Rise = USUAL) -> Judge:
    """Return a judge: a state's largest deviation grows less beyond the context after passing, if the base fails."""

    def judge(kept: Kept) -> Verdict:
        before, after = (
            kept.by_seed(rise.sweep, name, lambda found: growth(found, rise.context)) for name in ("base", passing)
        )
        less = below(f"growth of states, {passing} below base", after, before, one_start=True, ratio=True)
        return if_failing([failure(kept, "base", rise)], [less])

    return judge


def growth(found: Measures, context: int = CONTEXT) -> float:
    """Return the logarithm of a ratio: a state's last deviation over that at the context.

    Results from before 2026-11-28 lack the context: their first position, two contexts into the text, stands for it.
    """
    deviations = dict(found["deviations"])
    first = min(position for position in deviations if position >= context)
    return math.log(deviations[max(deviations)] / deviations[first])


def table_of(variants: Sequence[str], rise: Rise = USUAL) -> Callable[[Kept], Table]:
    """Return a function that makes a table: lowest perplexity, perplexity at multiples of the context, and rise."""
    positions = [rise.context * times for times in (1, 4, 16, 64) if times <= rise.at]

    def table(kept: Kept) -> Table:
        rows = []
        for variant in variants:
            if results := kept.found(rise.sweep, variant):
                of = [curve_of(of_seed) for of_seed in results]
                at = (spread([curve.near(position) for curve in of]) for position in positions)
                over = spread([math.exp(of_seed) for of_seed in rises(kept, variant, rise).values()], 3)
                rows.append((variant, str(len(of)), spread([curve.least for curve in of]), *at, over))
        names = (f"at {position}" for position in positions)
        return Table(("ours", "seeds", "least perplexity", *names, f"{rise.at}x over {rise.over}"), tuple(rows))

    return table


def training_rows(name: str) -> Callable[[Kept], Table]:
    """Return a function that makes a table for a base after several parts of its training."""

    def table(kept: Kept) -> Table:
        every = [parts_of(found) for found in kept.found("length", name)]
        if not every:
            return Table((), ())
        rows = []
        for eighth, parts in zip(EIGHTHS, zip(*every, strict=True), strict=True):
            curves = [curve_of(part) for part in parts]
            cells = (
                spread([curve.least for curve in curves]),
                spread([curve.near(CONTEXT * FAILS_AT) for curve in curves]),
                spread([math.exp(beyond_context(part)) for part in parts], 3),
            )
            rows.append((f"{CHINCHILLA * eighth:g}x", str(len(parts)), *cells))
        header = ("least perplexity", f"at {CONTEXT * FAILS_AT}", f"{FAILS_AT}x over {SAME_TEXT}")
        return Table((f"ours, {name}: Chinchilla's tokens", "seeds", *header), tuple(rows))

    return table


def behaviour_rows(kept: Kept) -> Table:
    rows = []
    for variant in ("base", "passing", "mamba", "mamba-passing", "gla", "gla-passing", "rwkv6", "rwkv6-passing"):
        if results := kept.found("length", variant):
            grown = spread([math.exp(growth(of_seed)) for of_seed in results])
            remembered = ", ".join(f"{remembrance(of_seed):.1e}" for of_seed in results)
            rows.append((variant, str(len(results)), remembered, grown))
    return Table(
        ("ours", "seeds", "Effective Remembrance up to one context, by seed", "deviation at the end over that at 1x"),
        tuple(rows),
    )


def draw(variants: Sequence[str], rise: Rise = USUAL) -> Callable[[Kept, Path], None]:
    """Return a function that draws perplexity by position.

    If the rise is over the same tokens within a context, their curves are dashed.
    """

    def drawn(kept: Kept, path: Path) -> None:
        from hybridtron.evaluate.pictures import picture

        with picture(path) as axes:
            shown = list[Curve]()
            paired = rise.over == SAME_TEXT
            for number, variant in enumerate(variants):
                results = kept.found(rise.sweep, variant)
                within = [Curve(**of_seed["within"]) for of_seed in results if paired]
                for of, style, label in (
                    ([curve_of(of_seed) for of_seed in results], "-", variant),
                    (within, "--", None),
                ):
                    if of:
                        draw_seeds(
                            axes,
                            of[0].ends,
                            [of_seed.perplexities for of_seed in of],
                            color=f"C{number}",
                            label=label,
                            style=style,
                        )
                    shown += of
            if paired:
                axes.plot([], [], "k--", label=SAME_TEXT)
            frame(axes, shown, rise.context, max(2, rise.context // 4))

    return drawn
