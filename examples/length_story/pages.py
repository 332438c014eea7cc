"""What the length story shows, as a page and two pictures: perplexity over the position, and accuracy of copying.

Numbers are means over seeds; the spread is the standard deviation of the seeds (n - 1), in pictures from the lowest
seed to the highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.proving.measuring import BenchTable, grid, processor, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PER_DOUBLING = 2  # bins of positions
FAILS = 1.2  # times its least perplexity, that a base must reach at FAILS_AT times its context
FAILS_AT = 4
COLORS = {"base": "black", "zero": "C2", "random": "C3", "fitted": "C1", "passing": "C0", "tbtt": "C4"}


@dataclass(frozen=True)
class Findings:
    """Of every run, by name and then by seed: mean loss by position, and accuracy by length of the string."""

    context: int
    language: Mapping[str, Mapping[int, Sequence[float]]]
    copying: Mapping[str, Mapping[int, Mapping[str, float]]]
    trained_lengths: tuple[int, int]
    notes: Sequence[str]


@dataclass(frozen=True)
class Curve:
    """Perplexity by bins of positions, each named by its last one."""

    ends: list[int]
    perplexities: list[float]

    @staticmethod
    def of(losses: Sequence[float], context: int) -> Curve:
        import torch

        from hybridtron.train.length_evaluation import perplexity_bins

        odd = context // (context & -context)  # whose doublings come by the context, so that it ends a bin
        bins = perplexity_bins(torch.tensor(losses, dtype=torch.float64), odd, PER_DOUBLING)
        return Curve([one.last for one in bins], [one.perplexity for one in bins])

    def at(self, position: int) -> float:
        """In the bin that ends there."""
        return self.perplexities[self.ends.index(position)]

    @property
    def least(self) -> float:
        return min(self.perplexities)


def curves(findings: Findings, name: str) -> list[Curve]:
    return [Curve.of(losses, findings.context) for losses in findings.language[name].values()]


def page(findings: Findings, command: str) -> str:
    """The whole page in Markdown."""
    lines = ["# Length generalization on a laptop", "", f"`{command}`", ""]
    lines += [
        f"- machine: {processor()}, one thread a run",
        f"- versions: {versions()}",
        *(f"- {note}" for note in findings.notes),
    ]
    lines += ["", "![perplexity over the position](length_story.png)"]
    for rows in (base_rows(findings), intervention_rows(findings), copying_rows(findings)):
        lines += ["", f"## {rows.title}", "", *grid(rows.header, rows.cells)]
    lines += ["", "![accuracy of copying](length_story_copying.png)", "", "## Goals", ""]
    reached = min(ratio(curve, findings.context * FAILS_AT) for curve in curves(findings, "base"))
    verdict = "yes" if reached >= FAILS else "**no**"
    goal = f"perplexity of every seed's base at {FAILS_AT}x its context / its least"
    lines += grid(("goal", "wanted", "measured", "reached"), [(goal, f">= {FAILS}", f"{reached:.2f}", verdict)])
    return "\n".join(lines) + "\n"


def ratio(curve: Curve, position: int) -> float:
    return curve.at(position) / curve.least


def read_lengths(findings: Findings) -> list[int]:
    """The context, four times of it, and so on to the end of what was read."""
    longest = max(len(losses) for losses in findings.language["base"].values())
    found = [findings.context * 4**power for power in range(8) if findings.context * 4**power <= longest]
    return found if found[-1] == longest else [*found, longest]


def base_rows(findings: Findings) -> BenchTable:
    """Every seed's base."""
    lengths = read_lengths(findings)
    header = ("seed", "least perplexity", *(f"at {named(one, findings)}" for one in lengths))
    header += tuple(f"{named(one, findings)} / least" for one in lengths[1:])

    def shown(curve: Curve) -> list[float]:
        return [curve.least, *map(curve.at, lengths), *(ratio(curve, one) for one in lengths[1:])]

    cells = [
        (str(seed), *(f"{value:.2f}" for value in shown(curve)))
        for seed, curve in zip(findings.language["base"], curves(findings, "base"), strict=True)
    ]
    return BenchTable("The base beyond its context", header, cells)


def intervention_rows(findings: Findings) -> BenchTable:
    """Every run, over its seeds."""
    lengths = read_lengths(findings)
    header = ("run", *(f"at {named(one, findings)}" for one in lengths), f"{named(lengths[-1], findings)} / least")
    cells = []
    for name in findings.language:
        of_name = curves(findings, name)
        at = [spread([curve.at(one) for curve in of_name]) for one in lengths]
        cells.append((name, *at, spread([ratio(curve, lengths[-1]) for curve in of_name])))
    return BenchTable("Perplexity after post-training", header, cells)


def copying_rows(findings: Findings) -> BenchTable:
    """Accuracy over the length of the string."""
    lengths = list(next(iter(next(iter(findings.copying.values())).values())))
    cells = [
        (name, *(spread([of_seed[length] for of_seed in seeds.values()]) for length in lengths))
        for name, seeds in findings.copying.items()
    ]
    trained = "{} to {}".format(*findings.trained_lengths)
    header = ("states in training", *(f"{length} letters" for length in lengths))
    return BenchTable(f"Letters copied rightly, trained on strings of {trained}", header, cells)


def named(position: int, findings: Findings) -> str:
    return f"{position // findings.context}x"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, or the value where it is the only one."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def draw(findings: Findings, folder: Path) -> None:
    """Both pictures."""
    draw_perplexity(findings, folder / "length_story.png")
    draw_copying(findings, folder / "length_story_copying.png")


def draw_perplexity(findings: Findings, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name in findings.language:
        of_name = curves(findings, name)
        ends = of_name[0].ends
        values = list(zip(*(curve.perplexities for curve in of_name), strict=True))
        style = "-" if name == "base" else "--"
        axes.plot(ends, [statistics.mean(one) for one in values], style, color=COLORS[name], label=name)
        axes.fill_between(ends, list(map(min, values)), list(map(max, values)), color=COLORS[name], alpha=0.15, lw=0)
    axes.axvline(findings.context, color="black", linestyle=":", linewidth=0.8, label=f"context {findings.context}")
    shown = [curve.perplexities[-1] for name in findings.language for curve in curves(findings, name)]
    least = min(curve.least for name in findings.language for curve in curves(findings, name))
    axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")
    axes.set(xlim=(max(2, findings.context // 4), None), ylim=(least / 1.1, min(max(shown) * 1.1, 20 * least)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}" if axis is axes.yaxis else "")
    finish(axes)
    figure.savefig(path)


def finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def draw_copying(findings: Findings, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    lengths: list[int] = []
    for name, seeds in findings.copying.items():
        lengths = [int(length) for length in next(iter(seeds.values()))]
        values = list(zip(*(of_seed.values() for of_seed in seeds.values()), strict=True))
        axes.plot(lengths, [statistics.mean(one) for one in values], "o-", color=COLORS[name], label=f"from {name}")
        axes.fill_between(lengths, list(map(min, values)), list(map(max, values)), color=COLORS[name], alpha=0.15, lw=0)
    for length, label in zip(findings.trained_lengths, ("lengths trained on", None), strict=True):
        axes.axvline(length, color="black", linestyle=":", linewidth=0.8, label=label)
    axes.set(xticks=lengths, xlabel="letters to copy", ylabel="copied rightly", ylim=(0, 1.02))
    finish(axes)
    figure.savefig(path)
