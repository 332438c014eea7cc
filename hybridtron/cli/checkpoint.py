"""List, verify, compare, reshard or fetch the checkpoints of a run.

    hybridtron checkpoint list runs/samba
    hybridtron checkpoint verify runs/samba                         every byte of every checkpoint
    hybridtron checkpoint verify runs/samba/checkpoints/step-00000500
    hybridtron checkpoint diff LEFT RIGHT                           settings and tensors that differ
    hybridtron checkpoint reshard CHECKPOINT OUTPUT --file-size 4GB full tensors, in files of about that size
    hybridtron checkpoint fetch s3://BUCKET/PREFIX runs/samba       from checkpoint.mirror, the newest
    hybridtron checkpoint fetch s3://BUCKET/PREFIX/step-00000500 runs/samba

Any layout loads any checkpoint, so a run resumes without resharding; `reshard` is for other readers, which want every
tensor in one file. No GPU and no other processes are needed.

Exit codes: 0 all valid, or no difference; 1 something is broken, or differs; 2 there is no such checkpoint, or an
argument is wrong.
"""

from __future__ import annotations

import argparse

from hybridtron.limits import path_of


def main(arguments: list[str]) -> int:
    """Parse the command line and run the sub-command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtron checkpoint", description="Look at checkpoints, verify, compare, rewrite or fetch them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|diff|reshard|fetch")
    for name, about in (("list", "the checkpoints of a run"), ("verify", "read every byte")):
        command = commands.add_parser(name, help=about)
        command.add_argument("path", type=path_of, help="a run's folder, or one checkpoint")
    command = commands.add_parser("diff", help="what is not the same in two checkpoints")
    command.add_argument("left", type=path_of)
    command.add_argument("right", type=path_of)
    command = commands.add_parser("reshard", help="rewrite a checkpoint with full tensors")
    command.add_argument("path", type=path_of, metavar="CHECKPOINT", help="or a run's folder, for its newest")
    command.add_argument("output", type=path_of)
    command.add_argument("--file-size", default="4GB", help="bytes of a file; default: 4GB")
    command = commands.add_parser("fetch", help="bring one back from checkpoint.mirror")
    command.add_argument("url", help="a mirror, for its newest, or one checkpoint in it")
    command.add_argument("run", type=path_of, help="the run's folder that it goes to")
    chosen = parser.parse_args(arguments)
    from hybridtron.cli import checkpoint_commands

    return checkpoint_commands.run(chosen)
