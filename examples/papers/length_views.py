"""How claims about perplexity and states beyond the context are read from results: tables, pictures and rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.long_text import Beyond, Curve, draw_seeds, frame, spread
from examples.papers.claim import Kept, Pair, Table, Verdict, holds, in_order, pooled
from examples.papers.columns import SAME_TEXT
from examples.papers.length_runs import CHINCHILLA, CONTEXT, EIGHTHS, LONGER, REPEATED, TIMES

FAILS = 1.2  # times its least perplexity, that a base must reach at FAILS_AT times its context
FAILS_AT = 16
REPAIRED = 1.1  # times the same tokens' perplexity within the context, that a repaired model may reach there
Judge = Callable[[Kept], Verdict]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Rise:
    """How far perplexity rises beyond the context in the runs of a sweep, as a logarithm, which deviates alike for all.

    `over` says what it is a multiple of.
    """

    sweep: str
    context: int
    over: str
    of: Callable[[Found], float]


def curve_of(found: Found) -> Curve:
    return Curve(**found.get("curve", found))


def beyond_context(found: Found) -> float:
    """The perplexity at 16 contexts over that of the same tokens, read within one."""
    return Beyond(Curve(**found["curve"]), Curve(**found["within"])).risen(CONTEXT * FAILS_AT)


def from_least(context: int) -> Callable[[Found], float]:
    """The perplexity at 16 contexts over the least of the curve, which for level curves is that of the easiest text."""

    def risen(found: Found) -> float:
        curve = curve_of(found)
        return math.log(curve.near(context * FAILS_AT) / curve.least)

    return risen


USUAL = Rise("length", CONTEXT, SAME_TEXT, beyond_context)
FORCED = Rise("language", 32, "least", from_least(32))


def rises(kept: Kept, variant: str, rise: Rise = USUAL) -> list[float]:
    """Of every seed."""
    return [rise.of(found) for found in kept.found(rise.sweep, variant)]


def multiple(kept: Kept, variant: str, rise: Rise = USUAL) -> float:
    """The mean over seeds."""
    return math.exp(statistics.mean(rises(kept, variant, rise)))


def fails(kept: Kept) -> Verdict:
    """Whether every seed's base fails beyond its context."""
    found = [math.exp(from_least(CONTEXT)(one)) for one in kept.found("length", "base")]
    named = ", ".join(f"{one:.2f}" for one in found)
    return holds([(f"the base's perplexity at {FAILS_AT}x over its least, by seed: {named}", min(found) >= FAILS)])


def why_not_failed(kept: Kept) -> str:
    """By what the model remembers, by more training, by Mamba, and by slow decays."""
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
    """Where nothing fails, there is no order of failing less."""

    def why(kept: Kept) -> str:
        found = [multiple(kept, variant) for variant in variants]
        return (
            f"none of these fails: at {FAILS_AT}x perplexity is {min(found):.3f} to {max(found):.3f} times that of "
            f"{SAME_TEXT}, so that there is nothing to put in order. What fails, and why these do not: figure2-fails"
        )

    return why


def why_not_repaired(kept: Kept) -> str:
    """By the story's base, which fails."""
    zero, passing, tbtt = (multiple(kept, name, FORCED) for name in ("zero", "passing", "tbtt"))
    return (
        "where the base does not fail (figure2-fails) there is nothing to repair. Of one that is made to fail: from "
        f"zero states {zero:.2f} at {FAILS_AT}x over its least, with passing {passing:.2f}, with TBTT {tbtt:.2f} "
        "(figure5-forced)"
    )


def repairs(names: Sequence[str]) -> Judge:
    """Whether these are level far beyond the context, where the same training from zero states is not."""

    def judge(kept: Kept) -> Verdict:
        found = {name: multiple(kept, name) for name in ("zero", *names)}
        return holds(
            (f"{name}: {value:.2f} at {FAILS_AT}x over {SAME_TEXT}", (value < REPAIRED) == (name != "zero"))
            for name, value in found.items()
        )

    return judge


def ordered(*pairs: tuple[str, str], rise: Rise = USUAL) -> Judge:
    """Whether the first of each pair rises less."""

    def judge(kept: Kept) -> Verdict:
        named = [Pair(f"{less} below {more}", rises(kept, less, rise), rises(kept, more, rise)) for less, more in pairs]
        return in_order(named, pooled(rises(kept, variant, rise) for variant in REPEATED))

    return judge


def fails_and_is_repaired(name: str) -> Judge:
    """Whether a base rises at all, and less after passing."""

    def judge(kept: Kept) -> Verdict:
        base, passing = rises(kept, name), rises(kept, f"{name}-passing")
        pairs = [Pair(f"0 below {name}", [0.0], base), Pair(f"{name}-passing below {name}", passing, base)]
        return in_order(pairs, pooled(rises(kept, variant) for variant in REPEATED))

    return judge


def more_training(kept: Kept) -> Verdict:
    """Whether a base rises more after 20 times Chinchilla's tokens than after 2.5 times."""
    early = [beyond_context(parts_of(found)[0]) for found in kept.found("length", "base")]
    return in_order([Pair("2.5x below 20x", early, rises(kept, "base"))], pooled([early, rises(kept, "base")]))


def parts_of(found: Found) -> list[Found]:
    """What was found of a base after parts of its training, and after all of it."""
    return [*(found["earlier"][step] for step in sorted(found["earlier"], key=int)), found]


def remembers_less(kept: Kept) -> Verdict:
    """Whether what lies three contexts and more before the end moves the answer less after passing."""
    base, passing = ([_far(found) for found in kept.found("length", name)] for name in ("base", "passing"))
    return in_order([Pair("passing below base", passing, base)], pooled([base, passing]))


def _far(found: Found) -> float:
    return statistics.mean(value for t, value in found["remembrance"] if 0 < t <= CONTEXT)


def steadier(kept: Kept) -> Verdict:
    """Whether the largest deviation of a state grows less beyond the context after passing."""
    base, passing = ([_grown(found) for found in kept.found("length", name)] for name in ("base", "passing"))
    return in_order([Pair("passing below base", passing, base)], pooled([base, passing]))


def _grown(found: Found) -> float:
    """The logarithm of the last deviation over that at the context."""
    (_, first), *_, (_, last) = found["deviations"]
    return math.log(last / first)


def table_of(variants: Sequence[str], rise: Rise = USUAL) -> Callable[[Kept], Table]:
    """Least perplexity, that at multiples of the context, and its rise."""
    positions = [rise.context * times for times in (1, 4, FAILS_AT)]

    def table(kept: Kept) -> Table:
        rows = []
        for variant in variants:
            if found := kept.found(rise.sweep, variant):
                of = [curve_of(one) for one in found]
                at = (spread([curve.near(position) for curve in of]) for position in positions)
                over = spread([math.exp(one) for one in rises(kept, variant, rise)], 3)
                rows.append((variant, str(len(of)), spread([curve.least for curve in of]), *at, over))
        names = (f"at {position}" for position in positions)
        return Table(("ours", "seeds", "least perplexity", *names, f"{FAILS_AT}x over {rise.over}"), tuple(rows))

    return table


def training_rows(kept: Kept) -> Table:
    """Of the first seed's base, after parts of its training."""
    found = kept.first("length", "base")
    if found is None:
        return Table((), ())
    rows = [
        (f"{CHINCHILLA * eighth:g}x", f"{curve_of(part).least:.2f}", f"{math.exp(beyond_context(part)):.3f}")
        for eighth, part in zip(EIGHTHS, parts_of(found), strict=True)
    ]
    return Table(("ours: Chinchilla's tokens", "least perplexity", f"{FAILS_AT}x over {SAME_TEXT}"), tuple(rows))


def behaviour_rows(kept: Kept) -> Table:
    rows = []
    for variant in ("base", "passing", "mamba", "mamba-passing", "gla", "gla-passing", "rwkv6", "rwkv6-passing"):
        if found := kept.found("length", variant):
            grown = spread([math.exp(_grown(one)) for one in found])
            remembered = ", ".join(f"{_far(one):.1e}" for one in found)
            rows.append((variant, str(len(found)), remembered, grown))
    return Table(
        ("ours", "seeds", "Effective Remembrance up to one context, by seed", "deviation at the end over that at 1x"),
        tuple(rows),
    )


def draw(variants: Sequence[str], rise: Rise = USUAL) -> Callable[[Kept, Path], None]:
    """Perplexity by position; where a rise is over that of the same tokens within a context, that is dashed."""

    def drawn(kept: Kept, path: Path) -> None:
        from hybridtron.evaluate.pictures import picture

        with picture(path) as axes:
            shown = list[Curve]()
            paired = rise.over == SAME_TEXT
            for number, variant in enumerate(variants):
                found = kept.found(rise.sweep, variant)
                within = [Curve(**one["within"]) for one in found if paired]
                for of, style, label in (([curve_of(one) for one in found], "-", variant), (within, "--", None)):
                    if of:
                        draw_seeds(axes, of[0].ends, [one.perplexities for one in of], f"C{number}", label, style)
                    shown += of
            if paired:
                axes.plot([], [], "k--", label=SAME_TEXT)
            frame(axes, shown, rise.context, max(2, rise.context // 4))

    return drawn
