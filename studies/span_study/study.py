"""Expansion Span on a laptop: a hybrid that is tuned on longer rows with every kind of attention, and its recall.

    python -m studies.span_study.study           an hour on two cores; a stopped study continues
    python -m studies.span_study.study --quick   tiny sizes, a minute: checks that the study runs, not its result

The sweep span.yaml trains a base for each seed, and tunes it; claims.py has the rules of agreement with the paper.
Steps are timed in turns when the page is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hybridtron.config.units import readable
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import SEED, SweepRun
from studies.judge import notes as judged_by
from studies.results import Result
from studies.span_study.asked import PAIRS, WINDOW, readings_of
from studies.span_study.cost import COSTS, YARDSTICK, step_times
from studies.span_study.pages import draw, page
from studies.span_study.runs import BASE, LONG, RECALLED, Sizes, part_of, sizes_of, write_rows
from studies.study import Measured, conduct, parse


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Expansion Span on a laptop.", "span_study", arguments)
    sizes = sizes_of(chosen.quick)
    if not chosen.measure:
        write_rows(sizes, chosen.data)
    return conduct(chosen, lambda: {"span": part_of(sizes, chosen.runs, chosen.data)}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the picture of the measured runs.

    Times the steps too. Raises Unusable if the base or the yardstick has no finished run.
    """
    runs = measured["span"]
    readings = {}
    for run, result in runs:
        readings.setdefault(run.variant, {})[run.values[SEED]] = readings_of(result.measured)
    if missing := [name for name in (BASE, YARDSTICK) if name not in readings]:
        raise Unusable(f"no run of {' and '.join(missing)} has finished, with which the page compares", code="no-file")
    settings = {run.variant: run.settings for run, _ in runs}
    timed = {name: settings[name] for name in COSTS if name in settings}
    draw(readings, output / "span_study.png")
    notes = [*described(runs, sizes), *more]
    (output / "span_study.md").write_text(page(readings, step_times(timed, sizes.timed), notes), encoding="utf-8")


def described(runs: Sequence[tuple[SweepRun, Result]], sizes: Sizes) -> list[str]:
    """Return notes that describe models, training and evaluation."""
    base = next(result.trained for run, result in runs if run.variant == BASE)
    tuned = next(result.trained for run, result in runs if run.variant == YARDSTICK).phases[0]
    size = f"{readable(base.parameters)} parameters, {base.pattern}, width {base.width}"
    minutes = sum(result.minutes for _, result in runs)
    return [
        f"base: {size}, {base.steps} steps, the last of them on rows of {RECALLED} tokens with {PAIRS} pairs",
        f"tuned: {tuned.tokens} tokens, {tuned.global_batch} rows of {LONG} a step, lr {tuned.lr:g}, chosen on one "
        "seed; HyLoRA of rank 32 where nothing else is said (studies/span_study/span.yaml)",
        f"asked: {sizes.asked} rows of each length, each with {PAIRS} values; beyond the window is more than {WINDOW} "
        "tokens away; perplexity is that of the values, which is all that can be predicted of it",
        "the claims: studies/span_study/claims.py; what is compared was written before the runs, how it is tested with "
        "their results known; peak memory over the length: benchmarks/span.md",
        *judged_by(),
        "± is the standard deviation over seeds; where there is none, there is one seed",
        f"{minutes:.0f} minutes of steps, with two runs and other work side by side",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
