"""Expansion Span on a laptop: a hybrid, tuned on longer rows with every kind of attention, and what it then recalls.

    python -m examples.span_study.study           an hour on two cores; a study that was stopped continues
    python -m examples.span_study.study --quick   tiny sizes, a minute: does it run, not what does it show

The sweep span.yaml trains a base for each seed, and tunes it; claims.py says what counts as agreeing with the paper.
Steps are timed when the page is written, in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.results import ROOT, Result
from examples.span_study.asked import PAIRS, WINDOW, readings_of
from examples.span_study.cost import COSTS, YARDSTICK, step_times
from examples.span_study.pages import draw, page
from examples.span_study.runs import BASE, LONG, QUICK, RECALLED, STUDY, Sizes, part_of, write_rows
from examples.study import Measured, conduct, parse
from hybridtron.config.units import readable
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import SEED, SweepRun


def main(arguments: list[str]) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    chosen = parse("Expansion Span on a laptop.", "span_study", arguments)
    sizes = QUICK if chosen.quick else STUDY
    data = chosen.runs / "data" if chosen.quick else ROOT / "data/span_study"
    if not chosen.measure:
        write_rows(sizes, data)
    return conduct(chosen, lambda: {"span": part_of(sizes, chosen.runs, data)}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Page and picture of what has been measured."""
    runs = measured["span"]
    found = {}
    for run, result in runs:
        found.setdefault(run.variant, {})[run.values[SEED]] = readings_of(result.found)
    if missing := [name for name in (BASE, YARDSTICK) if name not in found]:
        raise Unusable(f"no run of {' and '.join(missing)} has finished, with which the page compares")
    settings = {run.variant: run.settings for run, _ in runs}
    timed = {name: settings[name] for name in COSTS if name in settings}
    draw(found, output / "span_study.png")
    notes = [*described(runs, sizes), *more]
    (output / "span_study.md").write_text(page(found, step_times(timed, sizes.timed), notes), encoding="utf-8")


def described(runs: Sequence[tuple[SweepRun, Result]], sizes: Sizes) -> list[str]:
    """What was done, in words."""
    base = next(result.trained for run, result in runs if run.variant == BASE)
    tuned = next(result.trained for run, result in runs if run.variant == YARDSTICK).phases[0]
    size = f"{readable(base.parameters)} parameters, {base.pattern}, width {base.width}"
    minutes = sum(result.minutes for _, result in runs)
    return [
        f"base: {size}, {base.steps} steps, the last of them on rows of {RECALLED} tokens with {PAIRS} pairs",
        f"tuned: {tuned.tokens} tokens, {tuned.global_batch} rows of {LONG} a step, lr {tuned.lr:g}, chosen on one "
        "seed; HyLoRA of rank 32 where nothing else is said (examples/span_study/span.yaml)",
        f"asked: {sizes.asked} rows of each length, each with {PAIRS} values; beyond the window is more than {WINDOW} "
        "tokens away; perplexity is that of the values, which is all that can be predicted of it",
        "the claims: examples/span_study/claims.py, written before the runs; peak memory over the length: span.md",
        "± is the standard deviation over seeds; where there is none, there is one seed",
        f"{minutes:.0f} minutes of steps, with two runs and other work side by side",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
