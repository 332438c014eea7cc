"""The page of the length story, with two pictures: perplexity over the position, and accuracy of copying.

Numbers are means over seeds. The spread is the standard deviation over seeds (n - 1); bands in the pictures go from the
lowest seed to the highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.evaluate.pictures import picture
from hybridtron.proving.measuring import BenchReport, markdown
from studies.long_text import Curve, draw_seeds, spread

FAILS = 1.2  # ratio to its lowest perplexity that a failing base reaches at FAILS_AT times its context
FAILS_AT = 4
COPIES = 0.9  # share of letters that a base trained from zero states must copy at the longest trained length
COLORS = {"base": "black", "zero": "C2", "random": "C3", "fitted": "C1", "passing": "C0", "tbtt": "C4"}


@dataclass(frozen=True)
class Findings:
    """Results for all runs, by variant and then by seed.

    `language` holds perplexities by position, `copying` accuracies by string length.
    """

    context: int
    language: Mapping[str, Mapping[int, Curve]]
    copying: Mapping[str, Mapping[int, Mapping[str, float]]]
    trained_lengths: tuple[int, int]
    notes: Sequence[str]


def curves(findings: Findings, name: str) -> list[Curve]:
    return list(findings.language[name].values())


def page(findings: Findings, command: str) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("Length generalization on a laptop", notes=["one thread a run", *findings.notes])
    seeds = zip(findings.language["base"], curves(findings, "base"), strict=True)
    bases = {f"seed {seed}": [curve] for seed, curve in seeds}
    perplexity_rows(findings, report, "The base beyond its context", rows=bases)
    posted = {name: curves(findings, name) for name in findings.language}
    perplexity_rows(findings, report, "Perplexity after post-training", rows=posted, picture="length_story.png")
    copying_rows(findings, report)
    reached = min(ratio(curve, findings.context * FAILS_AT) for curve in curves(findings, "base"))
    report.at_least(f"perplexity of every seed's base at {FAILS_AT}x its context / its least", FAILS, reached)
    if base := findings.copying.get("zero"):
        longest = findings.trained_lengths[1]
        copied = statistics.mean(of_seed[str(longest)] for of_seed in base.values())
        report.at_least(f"letters copied rightly at {longest} letters, from zero states", COPIES, copied)
    return markdown(report, command)


def ratio(curve: Curve, position: int) -> float:
    return curve.at(position) / curve.least


def read_lengths(findings: Findings) -> list[int]:
    """Return the context, four times the context, and so on up to the longest measured position."""
    longest = max(curve.ends[-1] for curve in curves(findings, "base"))
    lengths = [findings.context * 4**power for power in range(8) if findings.context * 4**power < longest]
    return [*lengths, longest]


def perplexity_rows(
    findings: Findings, report: BenchReport, title: str, *, rows: Mapping[str, Sequence[Curve]], picture: str = ""
) -> None:
    """Add a table with a row for each group of curves.

    Its columns are the lowest perplexity, perplexities at several positions, and their ratios to the lowest.
    """
    lengths = read_lengths(findings)
    names = [f"{length // findings.context}x" for length in lengths]
    header = ("run", "least", *(f"at {name}" for name in names), *(f"{name} / least" for name in names[1:]))
    cells = []
    for name, of_row in rows.items():
        values = [[c.least, *map(c.at, lengths), *(ratio(c, position) for position in lengths[1:])] for c in of_row]
        cells.append((name, *map(spread, zip(*values, strict=True))))
    report.table(title, header, cells, picture)


def copying_rows(findings: Findings, report: BenchReport) -> None:
    """Add the table of copying accuracy by string length."""
    lengths = list(next(iter(next(iter(findings.copying.values())).values())))
    cells = [
        (name, *(spread([of_seed[length] for of_seed in seeds.values()]) for length in lengths))
        for name, seeds in findings.copying.items()
    ]
    trained = "{} to {}".format(*findings.trained_lengths)
    header = ("states in training", *(f"{length} letters" for length in lengths))
    title = f"Letters copied rightly, trained on strings of {trained}"
    report.table(title, header, cells, "length_story_copying.png")


def draw(findings: Findings, folder: Path) -> None:
    """Draw both pictures into a folder."""
    draw_perplexity(findings, folder / "length_story.png")
    draw_copying(findings, folder / "length_story_copying.png")


def draw_perplexity(findings: Findings, path: Path) -> None:
    with picture(path) as axes:
        for name in findings.language:
            of_name = curves(findings, name)
            style = "-" if name == "base" else "--"
            draw_seeds(
                axes,
                of_name[0].ends,
                [curve.perplexities for curve in of_name],
                color=COLORS[name],
                label=name,
                style=style,
            )
        axes.axvline(findings.context, color="black", linestyle=":", linewidth=0.8, label=f"context {findings.context}")
        every = [curve for name in findings.language for curve in curves(findings, name)]
        least = min(curve.least for curve in every)
        last = max(curve.perplexities[-1] for curve in every)
        axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")
        axes.set(xlim=(max(2, findings.context // 4), None), ylim=(least / 1.1, min(last * 1.1, 20 * least)))
        for axis, minor in ((axes.xaxis, ""), (axes.yaxis, "{x:g}")):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(minor)


def draw_copying(findings: Findings, path: Path) -> None:
    with picture(path, 3.5) as axes:
        for name, seeds in ((name, findings.copying[name]) for name in COLORS if name in findings.copying):
            lengths = [int(length) for length in next(iter(seeds.values()))]
            accuracies = [list(of_seed.values()) for of_seed in seeds.values()]
            draw_seeds(axes, lengths, accuracies, color=COLORS[name], label=f"from {name}", style="o-")
            axes.set_xticks(lengths)
        for length, label in zip(findings.trained_lengths, ("lengths trained on", None), strict=True):
            axes.axvline(length, color="black", linestyle=":", linewidth=0.8, label=label)
        axes.set(xlabel="letters to copy", ylabel="copied rightly", ylim=(0, 1.02))
