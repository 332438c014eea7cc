"""Audit of a parallel layout: every gradient, and a full optimizer step, is compared with a single process.

    hybridtron audit parallel.tensor=2 parallel.pipeline=2
    hybridtron audit recipe=samba_1.7b --layouts all
    hybridtron audit --cases all                             the same as `make audit`
    hybridtron audit --fake-bug tied_gradient                must fail
    hybridtron audit --cases all --gpus                      over NCCL

It takes the arguments of `hybridtron train`. It makes the recipe small: pattern, heads, options, tying and layout stay;
widths, states and windows shrink, so that it takes seconds. It starts the processes by itself, on the CPU over gloo.
One step of several micro-batches, with unequal masks and documents that end in mid-row, runs twice: on one process, as
a plain torch loop without parallel layers, engine or megatron-core; and in the layout, as the trainer does it. Loss,
gradient norm, every weight's full gradient, every rank's weights after the step, and the loss after it must agree:

    float64  within 1e-9 of each tensor's norm and 1e-13 of the largest; with megatron-core's plain data parallelism and
             optimizer
    fp32     within 1e-5 of each tensor's norm and 1e-7 of the largest, or within 2 times the change of a tensor when
             the serial step starts from weights perturbed in their last bit; with the distributed optimizer, and a
             clipping threshold that takes effect

With --gpus every rank has a GPU, and the reference is the engine on one of them, in fp32. Both use the same kernels, so
that only the communication of ranks is compared. Layouts that need more GPUs than there are get skipped.

Differences in float64 are rounding (1e-15) or bugs. megatron-core does three things in fp32 even for float64 weights.
It sums the gradient norm, which is allowed 1e-6. It clips, so the threshold is out of reach in float64. It divides by
the number of tokens in torch's default type, so that type is set to float64.

Exit codes: 0 all agree, 1 something differs or failed, 2 bad configuration.
"""

from __future__ import annotations

import argparse


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. `--help` imports neither torch nor megatron-core."""
    parser = argparse.ArgumentParser(
        prog="hybridtron audit", description="Compare every gradient of a parallel layout with one process."
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="as `hybridtron train` takes them: parallel.tensor=2"
    )
    parser.add_argument("--data", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--layouts", metavar="NAME,...", help="these layouts instead of the settings', or `all`")
    parser.add_argument("--cases", metavar="NAME,...", help="the table's architectures in all its layouts, or `all`")
    parser.add_argument("--fake-bug", metavar="NAME", help="put a bug into the parallel side: the audit must fail")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one run (default 300)")
    parser.add_argument("--gpus", action="store_true", help="over NCCL, a GPU for each rank, against one GPU, in fp32")
    parser.add_argument("--list", action="store_true", help="show layouts, architectures and bugs")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Print the largest difference of each case and precision. Returns the exit code."""
    chosen = parse(arguments)
    from hybridtron.proving.audit import table as audit_table

    return audit_table.run(chosen)  # imports torch, which --help does without
