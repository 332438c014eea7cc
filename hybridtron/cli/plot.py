"""A picture of a run: training loss by tokens, with held-out losses where they were measured.

hybridtron plot runs/laptop --output loss.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridtron.evaluate.pictures import picture
from hybridtron.problems import Unusable
from hybridtron.requirements import demand
from hybridtron.train.records import read_lines


def main(arguments: list[str]) -> int:
    """Draw the run's metrics.jsonl. Returns the exit code: 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="hybridtron plot", description="Draw training and held-out loss of a run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, default=None, help="the picture; default: loss.png in the run's folder")
    chosen = parser.parse_args(arguments)
    demand("plot")
    metrics = chosen.run / "metrics.jsonl"
    if not metrics.is_file():
        raise Unusable(f"{chosen.run} is not the folder of a run: it has no metrics.jsonl")
    lines = read_lines(metrics)
    if not lines:
        raise Unusable(f"{metrics} holds no step yet")
    output = chosen.output or chosen.run / "loss.png"
    draw(lines, output)
    print(output)
    return 0


def draw(lines: list[dict], output: Path) -> None:
    """Write the picture: tokens to the right, loss in nats per token upwards."""
    with picture(output) as axes:
        axes.plot([line["tokens"] for line in lines], [line["loss"] for line in lines], linewidth=0.8, label="training")
        evaluated = [line for line in lines if "validation" in line]
        for length in evaluated[-1]["validation"] if evaluated else ():
            with_length = [line for line in evaluated if length in line["validation"]]
            points = [(line["tokens"], line["validation"][length]) for line in with_length]
            label = f"held out, {length} length"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=0.8, label=label)
        axes.set(xlabel="tokens", ylabel="cross entropy (nats per token)")
