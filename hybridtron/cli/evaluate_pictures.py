"""The pictures of `hybridtron evaluate`: one for each instrument, from the lines that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = list[dict[str, Any]]


def draw(name: str, lines: Lines, seq_len: int, output: Path) -> None:
    """The picture of an instrument, with a dashed line where the training length is."""
    with picture(output) as axes:
        {"positions": draw_positions, "remembrance": draw_remembrance, "states": draw_states}[name](axes, lines)
        trained = lines[0]["length"] - seq_len if name == "remembrance" else seq_len
        if trained >= 0:
            axes.axvline(trained, color="black", linestyle="--", linewidth=0.8, label=f"training length {seq_len}")


@contextmanager
def picture(output: Path) -> Iterator[Axes]:
    """What is drawn inside, as a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(axes.lines) // 10)
    figure.savefig(output)


def draw_positions(axes: Axes, lines: Lines) -> None:
    """Every position faintly, and stretches of neighbours, eight to a doubling."""
    import torch

    from hybridtron.train.length_evaluation import perplexity_bins

    axes.plot([line["position"] for line in lines], [line["perplexity"] for line in lines], linewidth=0.3, alpha=0.4)
    bins = perplexity_bins(torch.tensor([line["loss"] for line in lines]), 1, 8)
    middles = [(one.first * one.last) ** 0.5 for one in bins]
    axes.plot(middles, [one.perplexity for one in bins], label="mean of neighbours")
    axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")


def draw_remembrance(axes: Axes, lines: Lines) -> None:
    for key, width in (("total_variation", 1.8), ("jensen_shannon", 0.8), ("cosine", 0.8)):
        axes.plot([line["t"] for line in lines], [line[key] for line in lines], ".-", linewidth=width, label=key)
    axes.set(xlabel=f"t (tokens not shown, of {lines[0]['length']})", ylabel="Effective Remembrance", ylim=(0, None))


def draw_states(axes: Axes, lines: Lines) -> None:
    from matplotlib import colormaps

    layers = list(dict.fromkeys(line["layer"] for line in lines))
    for color, layer in zip(colormaps["viridis"].resampled(len(layers))(range(len(layers))), layers, strict=True):
        points = [(line["position"], line["overall"]) for line in lines if line["layer"] == layer]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, label=f"layer {layer}")
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="standard deviation of the state")
