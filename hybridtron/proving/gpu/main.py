"""Checks this machine's GPU: does everything run, is it correct, and how fast is it.

    hybridtron check gpu               writes the report benchmarks/gpu_check.md
    hybridtron check gpu --only correctness --only kernels
    hybridtron check gpu --only every_recipe --recipe samba_421m
    hybridtron check gpu --rehearse    tiny sizes on any machine, to try the command; its numbers mean nothing

The parts are:

    correctness    every op and mixer compared with its reference on the CPU, in fp32 and bf16
    recipes        samba_421m and samba_1.3b for a few steps: tokens/s, TFLOP/s, MFU (the fraction of the GPU's peak
                   FLOP/s that the model's FLOPs amount to), and peak memory compared with the estimate
    every_recipe   a few steps with each recipe, with as many sequences as fit into memory; the results are written to
                   the recipe's verification card (a page with its measurements, in benchmarks/cards)
    kernels        times of each kernel for 2k to 64k tokens, as `hybridtron bench kernels` measures them, compared with
                   the kernels of other packages and with modelled times
    fp8            one recipe in FP8 and in bf16, if Transformer Engine is installed

If a part fails, the failure is reported, and the following parts still run.

Exit codes: 0 success, or no CUDA device; 1 a part failed or a goal was not reached; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib
import traceback
from typing import TYPE_CHECKING

from hybridtron.limits import path_of
from hybridtron.problems import CommandParser
from hybridtron.resources import BENCHMARKS, pages

if TYPE_CHECKING:
    from hybridtron.proving.measuring import BenchReport

PARTS = {
    "correctness": f"{__package__}.correct",
    "recipes": f"{__package__}.speed",
    "every_recipe": f"{__package__}.recipes",
    "kernels": f"{BENCHMARKS}.kernels",
    "fp8": f"{__package__}.speed",
}
"""Part's name -> module. In the module, the function with the part's name runs the part and fills the report."""
ROUNDS = 7  # repetitions of every time measurement


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="hybridtron check gpu", description="Check this machine's GPU with all ops, mixers and recipes."
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="run only this part; may be repeated")
    parser.add_argument(
        "--recipe", action="append", default=[], help="in every_recipe, run only this recipe; may be repeated"
    )
    parser.add_argument("--rehearse", action="store_true", help="use tiny sizes on any machine, to try this command")
    parser.add_argument("--output", type=path_of, metavar="FILE", help="report (default: benchmarks/gpu_check.md)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the parts, and print and write the report. Return the exit code."""
    chosen = parse(arguments)
    from hybridtron.device import compute_device  # imports torch, which --help does not need
    from hybridtron.ops.registry import EXAMPLES, choices_by_case
    from hybridtron.proving.measuring import BenchReport, publish

    parts = chosen.only or list(PARTS)
    device = compute_device().type
    if device == "cpu" and not chosen.rehearse:
        print(f"This machine has no CUDA device. On a GPU, these parts would run: {', '.join(parts)}.\n\n{__doc__}")
        return 0
    report = BenchReport("GPU check", chosen.rehearse, 1 if chosen.rehearse else ROUNDS, device=device)
    report.table("kernels", ("op", "runs", "why"), choices_by_case(device, EXAMPLES))
    failed = [name for name in parts if not ran(name, report, chosen.recipe)]
    report.notes += [f"{name} FAILED" for name in failed]
    folder = None if chosen.rehearse else pages()
    publish(report, "hybridtron check gpu", chosen.output or (folder and folder / "gpu_check.md"))
    if failed or not all(goal.reached for goal in report.goals):
        return 1
    return 0


def ran(part: str, report: BenchReport, recipes: list[str]) -> bool:
    """Run a part, and let it fill the report. Return False if the part failed. Only `every_recipe` uses `recipes`."""
    try:
        fill = getattr(importlib.import_module(PARTS[part]), part)
        fill(report, *([recipes] if part == "every_recipe" else []))
    except Exception:
        traceback.print_exc()
        return False
    return True
