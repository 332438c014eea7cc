"""Does all of it run on this machine's GPU, is it right, and how fast is it: one command, one table.

    python tools/gpu_check.py               writes benchmarks/gpu_check.md
    python tools/gpu_check.py --only correctness --only attention
    python tools/gpu_check.py --rehearse    the same on any machine with tiny sizes; its numbers say nothing

Parts: correctness (every op and mixer against its reference on the CPU, fp32 and bf16), recipes (samba_421m and
samba_1.3b for a few steps: tokens/s, TFLOP/s, MFU by our count, peak memory against the estimate), attention (span
attention against full attention and a window, 4k to 64k tokens), fp8 (the same recipe in FP8 and in bf16, where
Transformer Engine is there). A part that fails is told and does not keep the others from running.

Exit codes: 0 all well, or no CUDA device to check; 1 a part failed or a result is off by too much; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds the package without installing it

import torch

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import choices
from tools.bench_report import Goal, Report, Rows, Settings, markdown, print_report
from tools.gpu_correct import correctness
from tools.gpu_speed import attention_over_length, recipes

Part = Callable[[torch.device, bool], tuple[Rows, list[Goal], list[str]]]
"""From the device, and whether to be tiny: a table, what must hold, and remarks."""
TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_check.md"
STEPS = 8
LENGTHS = (4096, 8192, 16384, 32768, 65536)


def check_correctness(device: torch.device, tiny: bool) -> tuple[Rows, list[Goal], list[str]]:
    return *correctness(device, 64 if tiny else 256, 128 if tiny else 512), []


def check_recipes(_: torch.device, tiny: bool) -> tuple[Rows, list[Goal], list[str]]:
    rows, remarks = recipes([("samba_421m", 8), ("samba_1.3b", 4)], ["bf16"], 2 if tiny else STEPS, tiny)
    return rows, [], remarks


def check_attention(device: torch.device, tiny: bool) -> tuple[Rows, list[Goal], list[str]]:
    return attention_over_length(device, (128, 256) if tiny else LENGTHS, tiny), [], []


def check_fp8(_: torch.device, tiny: bool) -> tuple[Rows, list[Goal], list[str]]:
    precisions = ["bf16", "fp8_delayed", "fp8_current", "fp8_block"]
    rows, remarks = recipes([("samba_1.7b_padded", 2)], precisions, 2 if tiny else STEPS, tiny)
    return Rows(f"FP8: {rows.title}", rows.header, rows.cells), [], remarks


PARTS: dict[str, Part] = {
    "correctness": check_correctness,
    "recipes": check_recipes,
    "attention": check_attention,
    "fp8": check_fp8,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write their table. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Check this machine's GPU with all ops, mixers and two recipes.")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be given several times")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on any machine, to try this tool")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table (default: benchmarks/gpu_check.md)")
    chosen = parser.parse_args(arguments)
    parts, device = chosen.only or list(PARTS), compute_device()
    if device.type == "cpu" and not chosen.rehearse:
        print(f"no CUDA device here. On a machine with one this would run {', '.join(parts)}:\n\n{__doc__}")
        return 0
    tables, goals, notes, failed = [Rows("kernels", ("op", "form", "why"), choices(device.type))], [], [], []
    for name in parts:
        try:
            rows, of_part, remarks = PARTS[name](device, chosen.rehearse)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        tables.append(rows)
        goals += of_part
        notes += remarks
    notes += [f"{name} FAILED" for name in failed]
    report = Report("GPU check", device.type, tables, goals, notes)
    print_report(report)
    output = chosen.output or (None if chosen.rehearse else TABLE)
    if output is not None:
        settings = Settings(chosen.rehearse, STEPS, torch.get_num_threads())
        output.write_text(markdown(report, settings, "python tools/gpu_check.py"), encoding="utf-8")
        print(f"\nwritten to {output}")
    return 1 if failed or not all(goal.met for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
