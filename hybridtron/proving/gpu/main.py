"""Checks this machine's GPU: does everything run, is it correct, and how fast is it. One command writes one table.

    hybridtron check gpu               writes benchmarks/gpu_check.md
    hybridtron check gpu --only correctness --only kernels
    hybridtron check gpu --only every_recipe --recipe samba_421m
    hybridtron check gpu --rehearse    with tiny sizes on any machine; its numbers mean nothing

Parts: correctness (every op and mixer against its reference on the CPU, fp32 and bf16), recipes (samba_421m and
samba_1.3b for a few steps: tokens/s, TFLOP/s, MFU by our count, peak memory against the estimate), every_recipe (a step
of each that fits, for its verification card), kernels (as `hybridtron bench kernels`: each alone, 2k to 64k tokens,
compared with other packages' kernels and a rehearsal), fp8 (the same recipe in FP8 and in bf16, if Transformer Engine
is installed). A part that fails is reported and does not stop the others.

Exit codes: 0 all well, or no CUDA device to check; 1 a part failed or a result is off by too much; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib
import traceback
from typing import TYPE_CHECKING

from hybridtron.limits import path_of
from hybridtron.shipped import BENCHMARKS, pages

if TYPE_CHECKING:
    from hybridtron.proving.measuring import BenchReport

PARTS = {
    "correctness": f"{__package__}.correct",
    "recipes": f"{__package__}.speed",
    "every_recipe": f"{__package__}.recipes",
    "kernels": f"{BENCHMARKS}.kernels",
    "fp8": f"{__package__}.speed",
}
"""Name -> module with a function of that name, which fills the report."""
ROUNDS = 7  # repetitions of every measurement


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="hybridtron check gpu", description="Check this machine's GPU with all ops, mixers and recipes."
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--recipe", action="append", default=[], help="of every_recipe; may be given several times")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on any machine, to try this tool")
    parser.add_argument("--output", type=path_of, metavar="FILE", help="the table (default: benchmarks/gpu_check.md)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the parts and write their table. Returns the exit code."""
    chosen = parse(arguments)
    from hybridtron.device import compute_device  # imports torch, which --help does not need
    from hybridtron.ops.registry import choices
    from hybridtron.proving.measuring import BenchReport, publish

    parts = chosen.only or list(PARTS)
    device = compute_device().type
    if device == "cpu" and not chosen.rehearse:
        print(f"no CUDA device here. On a machine with one this would run {', '.join(parts)}:\n\n{__doc__}")
        return 0
    report = BenchReport("GPU check", chosen.rehearse, 1 if chosen.rehearse else ROUNDS, device=device)
    report.table("kernels", ("op", "runs", "why"), choices(device))
    failed = [name for name in parts if not ran(name, report, chosen.recipe)]
    report.notes += [f"{name} FAILED" for name in failed]
    folder = None if chosen.rehearse else pages()
    publish(report, "hybridtron check gpu", chosen.output or (folder and folder / "gpu_check.md"))
    if failed or not all(goal.reached for goal in report.goals):
        return 1
    return 0


def ran(part: str, report: BenchReport, recipes: list[str]) -> bool:
    """Run a part, which fills the report. Return False if it failed."""
    try:
        fill = getattr(importlib.import_module(PARTS[part]), part)
        fill(report, *([recipes] if part == "every_recipe" else []))
    except Exception:
        traceback.print_exc()
        return False
    return True
