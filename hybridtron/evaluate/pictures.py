"""The charts of `hybridtron evaluate`, drawn with matplotlib.

An instrument is a measurement on held-out text, such as the loss by position. An instrument's chart is drawn from the
lines (dicts) that the instrument wrote. A task's chart is drawn from rows: a dict for each task, length and metric.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.problems import Unusable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = list[dict[str, Any]]


def draw(name: str, lines: Lines, seq_len: int, output: Path) -> None:
    """Draw the chart for the instrument `name`, with a dashed line at the training length except for `entropy`."""
    if name == "entropy":
        entropy_curves({"measured": lines}, output)
        return
    with picture(output) as axes:
        {"positions": draw_positions, "remembrance": draw_remembrance, "states": draw_states}[name](axes, lines)
        if name == "remembrance":  # the x axis is the number of tokens not shown
            line_at = lines[0]["length"] - seq_len
        else:
            line_at = seq_len
        if line_at >= 0:
            axes.axvline(line_at, color="black", linestyle="--", linewidth=0.8, label=f"training length {seq_len}")


def require_format(output: Path) -> None:
    """Raise Unusable if matplotlib can't write files with this ending. Call this before anything is computed."""
    from matplotlib.backend_bases import FigureCanvasBase

    if (ending := output.suffix.removeprefix(".")) not in FigureCanvasBase.filetypes:
        known = ", ".join(sorted(FigureCanvasBase.filetypes))
        raise Unusable(
            f"{output}: the ending {ending!r} is not a picture format: use {known}",
            code="unknown-name",
        )


@contextmanager
def picture(output: Path, height: float = 4.5) -> Iterator[Axes]:
    """Yield axes to draw on, and write the figure to a file when the `with` body ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(axes.lines) // 10)
    figure.savefig(output)


def draw_positions(axes: Axes, lines: Lines) -> None:
    """Draw perplexity by position: a faint line for single positions, and two lines with perplexities in bins.

    A bin is a range of positions; there are eight bins for each doubling of the position. The second line has the
    perplexities with the context limited to the training length.
    """
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    axes.plot([line["position"] for line in lines], [line["perplexity"] for line in lines], linewidth=0.3, alpha=0.4)
    curves = (
        ("loss", "-", "in bins of positions"),
        ("loss_within", "--", "the same with context limited to the training length"),
    )
    for key, style, label in curves:
        bins = perplexity_bins(torch.tensor([line[key] for line in lines]), 1, 8)
        middles = [(token_bin.first * token_bin.last) ** 0.5 for token_bin in bins]
        axes.plot(middles, [token_bin.perplexity for token_bin in bins], style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")


def position_curves(of_runs: dict[str, Lines], seq_lens: list[int], output: Path) -> None:
    """Draw several runs' perplexity by position, with dashed lines at training lengths.

    The perplexities are computed in bins, eight for each doubling of the position.
    """
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    with picture(output) as axes:
        for name, lines in of_runs.items():
            bins = perplexity_bins(torch.tensor([line["loss"] for line in lines]), 1, 8)
            axes.plot(
                [(token_bin.first * token_bin.last) ** 0.5 for token_bin in bins],
                [token_bin.perplexity for token_bin in bins],
                label=name,
            )
        for seq_len in set(seq_lens):
            axes.axvline(seq_len, color="black", linestyle="--", linewidth=0.8, label=f"training length {seq_len}")
        axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")


def draw_remembrance(axes: Axes, lines: Lines) -> None:
    """Draw the distances between the next token's distributions with and without the first t tokens, over t."""
    for key, width in (("total_variation", 1.8), ("jensen_shannon", 0.8), ("cosine", 0.8)):
        axes.plot([line["t"] for line in lines], [line[key] for line in lines], ".-", linewidth=width, label=key)
    axes.set(xlabel=f"t (tokens not shown, of {lines[0]['length']})", ylabel="Effective Remembrance", ylim=(0, None))


def draw_states(axes: Axes, lines: Lines) -> None:
    """Draw the standard deviation of the recurrent states by position, a line for each layer."""
    from matplotlib import colormaps

    layers = list(dict.fromkeys(line["layer"] for line in lines))
    for color, layer in zip(colormaps["viridis"].resampled(len(layers))(range(len(layers))), layers, strict=True):
        points = [(line["position"], line["overall"]) for line in lines if line["layer"] == layer]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, label=f"layer {layer}")
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="standard deviation of the state")


def entropy_curves(of_runs: dict[str, Lines], output: Path) -> None:
    """Draw entropy by layer: for attention weights on the left, and for scans' step sizes on the right.

    There is a line for each run. A dotted line shows the largest possible entropy, which equal weights have.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("attention", "selection"), strict=True):
        for number, (name, lines) in enumerate(of_runs.items()):
            points = [(line["layer"], line["entropy"], line["bound"]) for line in lines if line["kind"] == kind]
            if points:
                layers, values, bounds = zip(*points, strict=True)
                axes.plot(layers, values, ".-", linewidth=1, color=f"C{number}", label=name)
                axes.plot(layers, bounds, ":", linewidth=0.8, color=f"C{number}", label="of equal weights")
        axes.set(title=kind, xlabel="layer", ylabel="entropy in nats", ylim=(0, None))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(output)


def heat_map(title: str, rows: Lines, seq_len: int, output: Path) -> None:
    """Draw a task's mean metric, from 0 to 1, by length (to the right) and depth (down). Missing cells are grey.

    The depth is the position in the text of the sentence that the model must find: 0% is the start, 100% is the end.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    depths = sorted({depth for row in rows for depth, _, _ in row["by_depth"]})
    values = np.full((len(depths), len(rows)), np.nan)
    for column, row in enumerate(rows):
        for depth, value, _ in row["by_depth"]:
            values[depths.index(depth), column] = value
    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap=colormaps["viridis"].with_extremes(bad="lightgrey"))
    axes.set_xticks(range(len(rows)), [str(row["length"]) for row in rows], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    if trained_columns := [column for column, row in enumerate(rows) if row["length"] <= seq_len]:
        axes.axvline(trained_columns[-1] + 0.5, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="length in tokens (dashed: training length)", ylabel="depth", title=title)
    figure.colorbar(image, ax=axes, label=rows[0]["metric"])
    figure.savefig(output)


def by_length(of_runs: dict[str, dict[str, Lines]], seq_lens: list[int], output: Path) -> None:
    """Draw each task's metric by length: a panel for each task, and in each panel a line with error bars for each run.

    The error bars are standard errors. Vertical dashed lines mark the training lengths.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for rows_by_task in of_runs.values() for task in rows_by_task))
    num_columns = min(4, len(tasks))
    num_rows = -(-len(tasks) // num_columns)
    figure = Figure(figsize=(3.2 * num_columns + 0.6, 2.4 * num_rows + 0.4), dpi=120, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, task in zip(panels, tasks, strict=False):
        for name, rows_by_task in of_runs.items():
            rows = rows_by_task.get(task, [])
            errors = [row["standard_error"] or 0 for row in rows]
            lengths = [row["length"] for row in rows]
            values = [row["value"] for row in rows]
            axes.errorbar(lengths, values, errors, marker="o", markersize=3, linewidth=1, label=name)
        for seq_len in set(seq_lens):
            axes.axvline(seq_len, color="black", linestyle="--", linewidth=0.6)
        metric = next(row["metric"] for rows_by_task in of_runs.values() for row in rows_by_task.get(task, []))
        axes.set_xscale("log", base=2)
        axes.set(title=task, xlabel="length in tokens", ylabel=metric, ylim=None if "perp" in metric else (-0.03, 1.03))
        axes.grid(alpha=0.3)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    if len(of_runs) > 1:
        panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(output)
