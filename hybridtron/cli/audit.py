"""Audit of a parallel layout: compares every gradient and a full optimizer step with the results of a single process.

    hybridtron audit parallel.tensor=2 parallel.pipeline=2
    hybridtron audit recipe=samba_1.7b --layouts all
    hybridtron audit --cases all                             the same as `make audit`
    hybridtron audit --fake-bug tied_gradient                must fail
    hybridtron audit --cases all --gpus                      over NCCL

The command takes the same arguments as `hybridtron train`. It shrinks the recipe, so that the audit takes seconds:
widths, states and windows get small, while the pattern, the heads, the options, tied embeddings and the layout stay.
The command starts the processes of the layout itself, on the CPU with the gloo backend.

The same optimizer step is computed twice:

    serial    by one process: a plain torch loop without parallel layers, engine or megatron-core
    parallel  by the layout's processes, with the code that trains

The step's micro-batches have different numbers of masked tokens, and documents end inside rows. The serial and the
parallel step must agree in: the loss, the gradient norm, every weight's full gradient, every rank's weights after the
step, and the loss after the step. The two steps are compared in two precisions:

    float64  tolerance: 1e-9 of a tensor's norm plus 1e-13 of the largest norm. The parallel step uses megatron-core's
             plain data parallelism and plain optimizer.
    fp32     tolerance: 1e-5 of a tensor's norm, plus 1e-7 of the largest norm, plus twice the rounding effect. To
             measure the rounding effect, the serial step is repeated from weights that are changed in about their last
             bit: the effect is the resulting change of the tensor. The parallel step uses the distributed optimizer,
             and the gradient norm is above the clipping threshold.

With --gpus every rank has a GPU, and the parallel step is compared with the same engine on a single GPU, in fp32. Both
use the same kernels, so a difference can only come from the communication between ranks. Layouts that need more GPUs
than the machine has are skipped.

In float64 a difference is either rounding (about 1e-15) or a bug. There are three exceptions, since megatron-core
computes three values in lower precision even for float64 weights:

    gradient norm      summed in fp32, so the norms may differ by 1e-6
    clipping           computed in fp32, so the float64 audit uses a threshold that no gradient reaches
    number of tokens   kept in torch's default dtype, so the float64 audit sets the default dtype to float64

Exit codes: 0 all values agree, 1 a value differs or a process failed, 2 bad configuration.
"""

from __future__ import annotations

import argparse

from hybridtron.problems import CommandParser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. `--help` imports neither torch nor megatron-core."""
    parser = CommandParser(
        prog="hybridtron audit", description="Compare every gradient of a parallel layout with one process."
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`: parallel.tensor=2"
    )
    parser.add_argument("--data", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--layouts", metavar="NAME,...", help="named layouts in place of parallel.* settings, or `all`")
    parser.add_argument("--cases", metavar="NAME,...", help="architectures to audit in all layouts, or `all`")
    parser.add_argument("--fake-bug", metavar="NAME", help="put this bug into the parallel step: the audit must fail")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one step (default 300)")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank (NCCL), against one GPU, in fp32")
    parser.add_argument("--list", action="store_true", help="show layouts, architectures and bugs")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Print the largest difference for each case and precision. Returns the exit code."""
    chosen = parse(arguments)
    from hybridtron.proving.audit import table as audit_table  # imports torch, which --help does not need

    return audit_table.run(chosen)
