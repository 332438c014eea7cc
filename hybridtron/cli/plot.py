"""Plot a run's training loss and held-out losses over the number of trained tokens.

hybridtron plot runs/laptop --output loss.png
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.config.units import readable
from hybridtron.evaluate.pictures import picture, require_format
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable
from hybridtron.requirements import demand
from hybridtron.train.jsonl import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")


def main(arguments: list[str]) -> int:
    """Plot a run's metrics.jsonl. Returns the exit code. Raises Unusable if the file is missing or has no step."""
    parser = CommandParser(prog="hybridtron plot", description="Draw training and held-out loss of a run.")
    parser.add_argument("run", type=path_of, help="the run's folder")
    parser.add_argument(
        "--output", type=path_of, default=None, help="file of the picture; default: loss.png in the run's folder"
    )
    chosen = parser.parse_args(arguments)
    demand("plot")
    output = chosen.output or chosen.run / "loss.png"
    require_format(output)
    metrics = chosen.run / "metrics.jsonl"
    if not metrics.is_file():
        raise Unusable(f"{chosen.run} has no metrics.jsonl: name the folder of a run", code="no-file")
    lines = read_lines(metrics)
    if not lines:
        raise Unusable(f"{metrics} has no step yet: wait for the first step", code="missing")
    draw(chosen.run.resolve().name, lines, output)
    print(output)
    return 0


def draw(name: str, lines: list[dict], output: Path) -> None:
    """Write the picture: loss in nats per token over tokens, with a dotted line at each phase's start."""
    with picture(output) as axes:
        tokens = [line["tokens"] for line in lines]
        axes.plot(tokens, [line["loss"] for line in lines], linewidth=0.8, color="0.6", label="training")
        draw_held_out(axes, [line for line in lines if "validation" in line])
        if len(begins := phase_begins(lines)) > 1:
            for phase, begin in begins.items():
                axes.axvline(begin, color="black", linestyle=":", linewidth=0.8)
                transform = axes.get_xaxis_transform()  # x in tokens, y as a fraction of the axes
                axes.text(begin, 0.98, f" {phase}", transform=transform, rotation=90, va="top", fontsize="small")
        axes.set(title=name, xlabel="tokens", ylabel="cross entropy (nats per token)")
        axes.xaxis.set_major_formatter(lambda amount, _: readable(amount))


def draw_held_out(axes: Axes, evaluated: list[dict]) -> None:
    """Plot a curve of held-out losses for each evaluated row length.

    The curves often coincide, so they differ in their dashes and marker sizes.
    """
    lengths = list(dict.fromkeys(length for line in evaluated for length in line["validation"]))
    for index, length in enumerate(lengths):
        points = [(line["tokens"], line["validation"][length]) for line in evaluated if length in line["validation"]]
        axes.plot(
            *zip(*points, strict=True),
            linestyle=DASHES[index % len(DASHES)],
            linewidth=1.2,
            marker=MARKERS[index % len(MARKERS)],
            markersize=4 + 2.5 * (len(lengths) - index - 1),
            markerfacecolor="none",
            label=f"held out, {length} length",
        )


def phase_begins(lines: list[dict]) -> dict[str, int]:
    """Return a mapping from each phase's name to the token count before the phase."""
    begins: dict[str, int] = {}
    before = 0
    for line in lines:
        if "phase" in line:
            begins.setdefault(line["phase"], before)
        before = line["tokens"]
    return begins
