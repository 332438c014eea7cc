"""Does all of it run on this machine's GPU, is it right, and how fast is it: one command, one table.

    hybridtron gpu-check               writes benchmarks/gpu_check.md
    hybridtron gpu-check --only correctness --only attention
    hybridtron gpu-check --rehearse    the same on any machine with tiny sizes; its numbers say nothing

Parts: correctness (every op and mixer against its reference on the CPU, fp32 and bf16), recipes (samba_421m and
samba_1.3b for a few steps: tokens/s, TFLOP/s, MFU by our count, peak memory against the estimate), attention (span
attention against full attention and a window, 4k to 64k tokens), fp8 (the same recipe in FP8 and in bf16, where
Transformer Engine is there). A part that fails is reported and does not stop the others.

Exit codes: 0 all well, or no CUDA device to check; 1 a part failed or a result is off by too much; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridtron.shipped import pages

PARTS = ("correctness", "recipes", "attention", "fp8")


def main(arguments: list[str]) -> int:
    """Run the parts and write their table. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtron gpu-check", description="Check this machine's GPU with all ops, mixers and two recipes."
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on any machine, to try this tool")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table (default: benchmarks/gpu_check.md)")
    chosen = parser.parse_args(arguments)
    from hybridtron.device import compute_device  # imports torch, which --help does without
    from hybridtron.proving.gpu import parts as gpu_parts

    parts, device = chosen.only or list(PARTS), compute_device()
    if device.type == "cpu" and not chosen.rehearse:
        print(f"no CUDA device here. On a machine with one this would run {', '.join(parts)}:\n\n{__doc__}")
        return 0
    folder = None if chosen.rehearse else pages()
    output = chosen.output or (folder and folder / "gpu_check.md")  # without a checkout it is only printed
    return 0 if gpu_parts.run(parts, device, chosen.rehearse, output) else 1
