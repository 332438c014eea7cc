"""Tables, pictures and rules for claims about perplexity and states beyond the context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.long_text import Beyond, Curve, draw_seeds, frame, spread
from studies.papers.claim import Kept, Pair, Table, Verdict, holds, in_order, pooled
from studies.papers.columns import SAME_TEXT
from studies.papers.length_runs import CHINCHILLA, CONTEXT, EIGHTHS, LONGER, REPEATED, TIMES

FAILS = 1.2  # ratio to its lowest perplexity that a failing base reaches at FAILS_AT times its context
FAILS_AT = 16
REPAIRED = 1.1  # largest ratio there, of a repaired model, to the same tokens' perplexity within the context
Judge = Callable[[Kept], Verdict]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Rise:
    """The rise of perplexity beyond the context in a sweep's runs, as a logarithm.

    Logarithms deviate alike for all models. `over` names the perplexity in the denominator.
    """

    sweep: str
    context: int
    over: str
    of: Callable[[Found], float]


def curve_of(found: Found) -> Curve:
    return Curve(**found.get("curve", found))


def beyond_context(found: Found) -> float:
    """Return the logarithm of a ratio: perplexity at 16 contexts over that for the same tokens within one."""
    return Beyond(Curve(**found["curve"]), Curve(**found["within"])).risen(CONTEXT * FAILS_AT)


def from_least(context: int) -> Callable[[Found], float]:
    """Return a function that gives the logarithm of perplexity at 16 contexts over the curve's lowest.

    In level curves the lowest belongs to the easiest text.
    """

    def risen(found: Found) -> float:
        curve = curve_of(found)
        return math.log(curve.near(context * FAILS_AT) / curve.least)

    return risen


USUAL = Rise("length", CONTEXT, SAME_TEXT, beyond_context)
FORCED = Rise("language", 32, "least", from_least(32))


def rises(kept: Kept, variant: str, rise: Rise = USUAL) -> list[float]:
    """Return the rise of a variant, by seed."""
    return [rise.of(found) for found in kept.found(rise.sweep, variant)]


def multiple(kept: Kept, variant: str, rise: Rise = USUAL) -> float:
    """Return the mean rise of a variant over seeds, as a ratio."""
    return math.exp(statistics.mean(rises(kept, variant, rise)))


def fails(kept: Kept) -> Verdict:
    """Check that every seed's base fails beyond its context."""
    ratios = [math.exp(from_least(CONTEXT)(of_seed)) for of_seed in kept.found("length", "base")]
    named = ", ".join(f"{of_seed:.2f}" for of_seed in ratios)
    return holds([(f"the base's perplexity at {FAILS_AT}x over its least, by seed: {named}", min(ratios) >= FAILS)])


def why_not_failed(kept: Kept) -> str:
    """Explain a base that does not fail: by its short memory, more training, Mamba, and slow decays."""
    remembered = statistics.mean(_far(found) for found in kept.found("length", "base"))
    longer, mamba = (
        ", ".join(f"{math.exp(beyond_context(part)):.3f}" for part in parts_of(kept.first("length", name)))
        for name in (LONGER, "mamba")
    )
    return (
        f"the least is that of a few easy tokens: at {FAILS_AT}x perplexity is {multiple(kept, 'base'):.3f} times that "
        f"of {SAME_TEXT}. Nothing rises, because this model forgets: what lies three contexts back moves its answers "
        f"by {remembered:.1e} (Effective Remembrance). Trained {TIMES} times as long it is {longer} times that, after "
        f"1, 2, 4 and 8 eighths. Mamba fails, a little, and more with more training: {mamba} times after 2.5, 5, 10 "
        "and 20 times Chinchilla's tokens (figure1-mamba). Of a Mamba-2 whose states decay slowly from the start it is "
        f"{multiple(kept, 'base', FORCED):.2f} times the least (figure5-forced)"
    )


def why_no_order(variants: Sequence[str]) -> Callable[[Kept], str]:
    """Return a function that explains a missing order: no model fails, so none fails less."""

    def why(kept: Kept) -> str:
        ratios = [multiple(kept, variant) for variant in variants]
        return (
            f"none of these fails: at {FAILS_AT}x perplexity is {min(ratios):.3f} to {max(ratios):.3f} times that of "
            f"{SAME_TEXT}, so that there is nothing to put in order. What fails, and why these do not: figure2-fails"
        )

    return why


def why_not_repaired(kept: Kept) -> str:
    """Explain a missing repair by the story's base, which does fail."""
    zero, passing, tbtt = (multiple(kept, name, FORCED) for name in ("zero", "passing", "tbtt"))
    return (
        "where the base does not fail (figure2-fails) there is nothing to repair. Of one that is made to fail: from "
        f"zero states {zero:.2f} at {FAILS_AT}x over its least, with passing {passing:.2f}, with TBTT {tbtt:.2f} "
        "(figure5-forced)"
    )


def repairs(names: Sequence[str]) -> Judge:
    """Return a judge: the named models are level far beyond the context, and the one from zero states is not."""

    def judge(kept: Kept) -> Verdict:
        ratios = {name: multiple(kept, name) for name in ("zero", *names)}
        return holds(
            (f"{name}: {value:.2f} at {FAILS_AT}x over {SAME_TEXT}", (value < REPAIRED) == (name != "zero"))
            for name, value in ratios.items()
        )

    return judge


def ordered(*pairs: tuple[str, str], rise: Rise = USUAL) -> Judge:
    """Return a judge of pairs (less, more): it checks that the first model rises less."""

    def judge(kept: Kept) -> Verdict:
        named = [Pair(f"{less} below {more}", rises(kept, less, rise), rises(kept, more, rise)) for less, more in pairs]
        return in_order(named, pooled(rises(kept, variant, rise) for variant in REPEATED))

    return judge


def fails_and_is_repaired(name: str) -> Judge:
    """Return a judge: the base's perplexity rises, and rises less after passing."""

    def judge(kept: Kept) -> Verdict:
        base = rises(kept, name)
        passing = rises(kept, f"{name}-passing")
        pairs = [Pair(f"0 below {name}", [0.0], base), Pair(f"{name}-passing below {name}", passing, base)]
        return in_order(pairs, pooled(rises(kept, variant) for variant in REPEATED))

    return judge


def more_training(kept: Kept) -> Verdict:
    """Check that a base rises more after 20 times Chinchilla's tokens than after 2.5 times."""
    early = [beyond_context(parts_of(found)[0]) for found in kept.found("length", "base")]
    return in_order([Pair("2.5x below 20x", early, rises(kept, "base"))], pooled([early, rises(kept, "base")]))


def parts_of(found: Found) -> list[Found]:
    """Return a base's results after parts of its training, in order, and after all of it."""
    return [*(found["earlier"][step] for step in sorted(found["earlier"], key=int)), found]


def remembers_less(kept: Kept) -> Verdict:
    """Check that tokens far before the end move the answer less after passing."""
    base, passing = ([_far(found) for found in kept.found("length", name)] for name in ("base", "passing"))
    return in_order([Pair("passing below base", passing, base)], pooled([base, passing]))


def _far(found: Found) -> float:
    return statistics.mean(value for t, value in found["remembrance"] if 0 < t <= CONTEXT)


def steadier(kept: Kept) -> Verdict:
    """Check that the largest deviation of a state grows less beyond the context after passing."""
    base, passing = ([_grown(found) for found in kept.found("length", name)] for name in ("base", "passing"))
    return in_order([Pair("passing below base", passing, base)], pooled([base, passing]))


def _grown(found: Found) -> float:
    """Return the logarithm of the last deviation over the first."""
    (_, first), *_, (_, last) = found["deviations"]
    return math.log(last / first)


def table_of(variants: Sequence[str], rise: Rise = USUAL) -> Callable[[Kept], Table]:
    """Return a function that makes a table: lowest perplexity, perplexity at multiples of the context, and rise."""
    positions = [rise.context * times for times in (1, 4, FAILS_AT)]

    def table(kept: Kept) -> Table:
        rows = []
        for variant in variants:
            if results := kept.found(rise.sweep, variant):
                of = [curve_of(of_seed) for of_seed in results]
                at = (spread([curve.near(position) for curve in of]) for position in positions)
                over = spread([math.exp(of_seed) for of_seed in rises(kept, variant, rise)], 3)
                rows.append((variant, str(len(of)), spread([curve.least for curve in of]), *at, over))
        names = (f"at {position}" for position in positions)
        return Table(("ours", "seeds", "least perplexity", *names, f"{FAILS_AT}x over {rise.over}"), tuple(rows))

    return table


def training_rows(kept: Kept) -> Table:
    """Return a table for the first seed's base after several parts of its training."""
    results = kept.first("length", "base")
    if results is None:
        return Table((), ())
    rows = [
        (f"{CHINCHILLA * eighth:g}x", f"{curve_of(part).least:.2f}", f"{math.exp(beyond_context(part)):.3f}")
        for eighth, part in zip(EIGHTHS, parts_of(results), strict=True)
    ]
    return Table(("ours: Chinchilla's tokens", "least perplexity", f"{FAILS_AT}x over {SAME_TEXT}"), tuple(rows))


def behaviour_rows(kept: Kept) -> Table:
    rows = []
    for variant in ("base", "passing", "mamba", "mamba-passing", "gla", "gla-passing", "rwkv6", "rwkv6-passing"):
        if results := kept.found("length", variant):
            grown = spread([math.exp(_grown(of_seed)) for of_seed in results])
            remembered = ", ".join(f"{_far(of_seed):.1e}" for of_seed in results)
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
