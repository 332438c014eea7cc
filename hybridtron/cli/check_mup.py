"""Coordinate check of muP: do outputs change by the same amount at every width?

    hybridtron check mup model.mup.base_width=64
    hybridtron check mup recipe=mamba2_laptop model.mup.base_width=64 --output mup.png
    hybridtron check mup --standard                          without muP, for comparison

The command takes the same settings as `hybridtron train`. It trains small models of the recipe's family at several
widths for a few steps, on random tokens and on the CPU (`proving/coordinates.py`). It prints two root mean squares for
each output: of the output, and of its change since the first step. Then it prints, for each output, the slope of
log(change) over log(width).

Exit codes: 0 all slopes are flat, 1 a slope is not flat, 2 bad configuration.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridtron.architecture.mup import MupConfig
from hybridtron.cli.arguments import positive
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, ConfigError, Problem, Unusable
from hybridtron.requirements import demand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridtron.config.schema import Config
    from hybridtron.proving.coordinates import Coordinate

WIDTHS = [64, 128, 256, 512, 1024]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="hybridtron check mup", description="Measure how far outputs move in a few steps, at several widths."
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`: model.mup.base_width=64"
    )
    parser.add_argument(
        "--widths", type=widths_of, default=WIDTHS, metavar="N,...", help="widths (default 64,128,256,512,1024)"
    )
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="AdamW steps (default 8)")
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="seeds to average over (default 2)")
    parser.add_argument("--lr", type=float, default=None, help="learning rate (default: the first phase's)")
    parser.add_argument("--standard", action="store_true", help="without muP: slopes of the standard parametrisation")
    parser.add_argument("--output", type=path_of, default=None, metavar="FILE", help="draw the changes to this file")
    return parser.parse_intermixed_args(arguments)


def widths_of(text: str) -> list[int]:
    """Parse at least two different widths for argparse, and sort them."""
    widths = sorted({positive(width) for width in text.split(",")})
    if len(widths) < 2:
        raise ArgumentTypeError(f"{text!r} must have at least two widths, such as 64,256")
    return widths


def main(arguments: list[str]) -> int:
    """Print the measurements. Returns the exit code."""
    chosen = parse(arguments)
    if chosen.output is not None:
        demand("plot")
        from hybridtron.evaluate.pictures import require_format

        require_format(chosen.output)
    from hybridtron.proving import coordinates  # imports torch, which --help does not need
    from hybridtron.proving.steps import load_checked

    config = _with_mup(load_checked(chosen.settings), chosen.standard)
    lr = chosen.lr or config.phases[0].lr
    if lr is None:
        raise Unusable("the first phase has no learning rate: set --lr", code="missing")
    points = coordinates.measure(config, chosen.widths, chosen.steps, lr, chosen.seeds)
    print(f"rms of the output, and of its change since step 0; learning rate {lr:g}")
    for output in dict.fromkeys(point.output for point in points):
        print_table([point for point in points if point.output == output])
    print(
        f"\nslope of the change after step {chosen.steps}, and largest slope of all steps; flat: {coordinates.FLAT:g}"
    )
    slopes = coordinates.slopes(points)
    for slope in slopes:
        print(f"  {slope.output:<24}{slope.last:>+7.2f}{slope.largest:>+7.2f}  {slope.verdict}")
    if chosen.output is not None:
        coordinates.draw(points, chosen.output)
        print(chosen.output)
    if all(slope.verdict == "flat" for slope in slopes):
        return 0
    return 1


def _with_mup(config: Config, standard: bool) -> Config:
    """Return the configuration, without muP if `standard` is set.

    Raises ConfigError if `standard` is not set and the configuration does not use muP.
    """
    if standard:
        return replace(config, model=replace(config.model, mup=MupConfig()))
    if config.model.mup.base_width is None:
        cure = "set it, such as model.mup.base_width=64, or add --standard to measure without muP"
        raise ConfigError([Problem("model.mup.base_width", "missing", f"is null: {cure}")])
    return config


def print_table(points: Sequence[Coordinate]) -> None:
    """Print one output's measurements: a line for each step, a column for each width."""
    widths = dict.fromkeys(point.width for point in points)
    print(f"\n{points[0].output}\n  step" + "".join(f"{f'width {width}':>18}" for width in widths))
    for step in dict.fromkeys(point.step for point in points):
        at_step = [point for point in points if point.step == step]
        print(f"  {step:<4}" + "".join(f"{f'{point.size:.3g}, {point.change:.3g}':>18}" for point in at_step))
