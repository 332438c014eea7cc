"""Look at the checkpoints of a run: which there are, whether they are whole, how two differ; or rewrite one.

    hybridtron checkpoint list runs/samba
    hybridtron checkpoint verify runs/samba                         every byte of every checkpoint
    hybridtron checkpoint verify runs/samba/checkpoints/step-00000500
    hybridtron checkpoint diff LEFT RIGHT                           settings and tensors that are not the same
    hybridtron checkpoint reshard CHECKPOINT OUTPUT --file-size 4GB whole tensors, in files of about that size
    hybridtron checkpoint fetch s3://BUCKET/PREFIX runs/samba       from checkpoint.mirror, the newest
    hybridtron checkpoint fetch s3://BUCKET/PREFIX/step-00000500 runs/samba

Any layout loads any checkpoint, so that nothing has to be resharded before a run resumes; `reshard` is for readers who
want every tensor in one piece. Needs neither a GPU nor other processes. Exit codes: 0 all well (of `diff`: the same), 1
something is broken (differs), 2 there is no such checkpoint, or a wrong argument.
"""

from __future__ import annotations

import argparse

from hybridtron.limits import path_of


def main(arguments: list[str]) -> int:
    """Do what is asked. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtron checkpoint", description="Look at checkpoints, verify, compare, rewrite or fetch them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|diff|reshard|fetch")
    for name, what in (("list", "the checkpoints of a run"), ("verify", "read every byte")):
        command = commands.add_parser(name, help=what)
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
