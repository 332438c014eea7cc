"""The page of the study: recall by length, needles by distance, perplexity, cost, and agreement with the paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybridtron.architecture.attention import ReadingAttention
from hybridtron.evaluate.pictures import picture
from hybridtron.proving.measuring import BenchReport, markdown, times
from studies.long_text import draw_seeds
from studies.span_study.asked import LENGTHS, WINDOW, Asked, Readings
from studies.span_study.claims import COLUMNS, FULL, SCORED, TRAINED, Found, judged, score
from studies.span_study.cost import YARDSTICK, Costs, ratio
from studies.span_study.runs import BASE, LONG, RECALLED

LEAST_BASE = 0.95
LEAST_OVER_WINDOW = 0.2  # recall that full attention must gain beyond the window, or the task tests no retrieval
DRAWN = (BASE, "full", "SW", "S2", "NoMem", "random", "LM", "SE")


def page(found: Found, costs: Costs, notes: Sequence[str]) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("Expansion Span on a laptop", notes=list(notes))
    report.table("What the paper says, and what is seen here", COLUMNS, judged(found, costs))
    lengths = [length for length in LENGTHS if length in next(iter(found[BASE].values()))[FULL]]
    recall_tables(report, found, lengths)
    needle_table(report, found)
    by_length(report, "Perplexity of the values", found, lengths=lengths, how=FULL, value=perplexity)
    by_length(
        report,
        "Perplexity of the values, read as trained",
        own_reading(found),
        lengths=lengths,
        how=TRAINED,
        value=perplexity,
    )
    cost_table(report, costs)
    goals(report, found)
    return markdown(report, "make span-study")


def recall_tables(report: BenchReport, found: Found, lengths: Sequence[int]) -> None:
    """Add the tables of recall: read with full attention as in the paper, and with the trained attention."""
    scored = f"{min(SCORED)} to {max(SCORED)}"
    means = {name: mean_of([score(readings) for readings in of.values()]) for name, of in found.items()}
    title = "Recall by length, read with full attention (figures 2, 3, 5, 6, 12 and 13)"
    by_length(
        report, title, found, lengths=lengths, how=FULL, value=recall, last=(scored, means), picture="span_study.png"
    )
    limited = own_reading(found)
    means = {name: mean_of([score(readings, TRAINED) for readings in of.values()]) for name, of in limited.items()}
    by_length(
        report,
        "Recall by length, read as trained (figure 11)",
        limited,
        lengths=lengths,
        how=TRAINED,
        value=recall,
        last=(scored, means),
    )


def own_reading(found: Found) -> Found:
    """Return the models that were trained with another attention than the full one."""
    return {
        name: of
        for name, of in found.items()
        if any(readings[FULL] is not readings[TRAINED] for readings in of.values())
    }


def recall(one: Asked) -> float:
    return one.recall


def perplexity(one: Asked) -> float:
    return one.perplexity


def by_length(
    report: BenchReport,
    title: str,
    found: Found,
    *,
    lengths: Sequence[int],
    how: ReadingAttention,
    value: Callable[[Asked], float],
    last: tuple[str, Mapping[str, str]] | None = None,
    picture: str = "",
) -> None:
    """Add a table with a row for each model and a column for each length.

    `last` is a further column: its title, and its cells by model.
    """
    header = ["model", *map(str, lengths)]
    rows = {
        name: [name, *(mean_of([value(readings[how][length]) for readings in of.values()]) for length in lengths)]
        for name, of in found.items()
    }
    if last:
        column, cells = last
        header.append(column)
        for name, row in rows.items():
            row.append(cells[name])
    report.table(title, tuple(header), rows.values(), picture)


def mean_of(values: Sequence[float]) -> str:
    """Format mean and standard deviation over seeds, or a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def needle_table(report: BenchReport, found: Found) -> None:
    """Add the table of recall at the tuned length, for needles within the window and beyond it."""
    columns = [(how, inside) for how in (FULL, TRAINED) for inside in (True, False)]
    words = {True: f"within {WINDOW}", False: f"beyond {WINDOW}"}
    header = ("model", *(f"{words[inside]}, read {said(how)}" for how, inside in columns))
    rows = [(name, *(mean_of(needles(of, how, inside)) for how, inside in columns)) for name, of in found.items()]
    report.table(f"Needles by distance, in rows of {LONG}", header, rows)


def said(how: ReadingAttention) -> str:
    return "with full attention" if how is FULL else "as trained"


def needles(of: Mapping[str, Readings], how: ReadingAttention, inside: bool) -> list[float]:
    """Return recall by seed at the tuned length, of needles inside the window or beyond it."""
    shares = [readings[how][LONG].within(inside) for readings in of.values()]
    return [share for share in shares if share is not None]


def cost_table(report: BenchReport, costs: Costs) -> None:
    """Add the table of costs (Figure 4).

    The layer is small beside the rest of the step, so attention's share of the time grows with the length.
    """
    names = list(next(iter(costs.values())))
    header = ("tokens", *(f"step, {name} / {YARDSTICK}" for name in names if name != YARDSTICK))
    header += tuple(f"attention FLOPs, {name} / {YARDSTICK}" for name in names if name != YARDSTICK)
    rows = []
    for length, of in costs.items():
        window = of[YARDSTICK]
        others = [of[name] for name in names if name != YARDSTICK]
        step = (times(ratio(of, name, YARDSTICK)) for name in names if name != YARDSTICK)
        rows.append((str(length), *step, *(times(other.flops / window.flops) for other in others)))
    report.table("Cost of a training step by length (figure 4)", header, rows)


def goals(report: BenchReport, found: Found) -> None:
    """Add the checks without which the other results mean nothing.

    Every base must recall in rows like its last training, and beyond the window full attention must recall more.
    """
    least = min(readings[FULL][RECALLED].recall for readings in found[BASE].values())
    report.at_least(f"recall of every base in rows of {RECALLED}", LEAST_BASE, least)
    if {"full", YARDSTICK} <= found.keys():
        for how in (FULL, TRAINED):
            full, window = (statistics.mean(needles(found[name], how, False)) for name in ("full", YARDSTICK))
            text = f"what full attention finds beyond the window more than SW, read {said(how)}"
            report.at_least(text, LEAST_OVER_WINDOW, full - window)


def draw(found: Found, path: Path) -> None:
    """Draw recall by length, read with full attention."""
    drawn = [name for name in DRAWN if name in found]
    with picture(path) as axes:
        for number, name in enumerate(drawn):
            seeds = [readings[FULL] for readings in found[name].values()]
            lengths = sorted(seeds[0])
            values = [[of_seed[length].recall for length in lengths] for of_seed in seeds]
            draw_seeds(axes, lengths, values, color=f"C{number}", label=name, style="-o")
        axes.axvline(LONG, color="black", linestyle=":", linewidth=0.8, label=f"tuned on {LONG}")
        axes.set(xscale="log", xlabel="tokens of a row", ylabel="recall", ylim=(0, 1.02))
