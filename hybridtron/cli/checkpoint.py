"""List, verify, compare, average, reshard, fetch, export or import the checkpoints of a run.

    hybridtron checkpoint list runs/samba
    hybridtron checkpoint verify runs/samba                           read every byte of every checkpoint
    hybridtron checkpoint verify runs/samba/checkpoints/step-00000500
    hybridtron checkpoint diff LEFT RIGHT                             list settings and tensors that differ
    hybridtron checkpoint average A B C --output MEAN                 write the mean of the weights
    hybridtron checkpoint reshard CHECKPOINT OUTPUT --file-size 4GB   write a copy with full tensors, in files of 4 GB
    hybridtron checkpoint export runs/samba OUTPUT --to dcp           write a folder for torch.distributed.checkpoint
    hybridtron checkpoint export runs/llama OUTPUT --to torch_dist    write a folder of megatron-core
    hybridtron checkpoint import OUTPUT CHECKPOINT                    write a checkpoint from such a folder
    hybridtron checkpoint fetch s3://BUCKET/PREFIX runs/samba         download the newest checkpoint of a mirror
    hybridtron checkpoint fetch s3://BUCKET/PREFIX/step-00000500 runs/samba

The checkpoints to average come from one run, or from several runs with equal architecture. Each is named by its folder,
as RUN (the run's newest checkpoint), or as RUN@best (the run's checkpoint with the lowest held-out loss). The average
contains only weights: `run.weights=MEAN`, `evaluate`, `generate` and `export` read it, but no run resumes from it. With
--ema it is the mean of the moving averages that runs with `run.ema` store.

An export (`--to dcp` or `--to safetensors`) has weights, optimizer state and states, each tensor whole, for other
programs. The import of an unchanged export equals its source, so a run resumes from it. An import runs no code from the
folder. For transformers use `hybridtron export`.

With `--to torch_dist` an export has the weights alone, for megatron-core's GPTModel: every layer must have full
attention with rotary positions and a gated MLP (swiglu). Such a folder is imported for `run.weights`. If core wrote it
without Megatron-LM's arguments, --heads, --rope-base and --norm-eps say what its tensors do not show.

A mirror is the S3 folder that a run's `checkpoint.mirror` names. Any parallel layout loads any checkpoint, so a run
resumes without `reshard`. The sub-command `reshard` is for other programs that read a checkpoint and expect every
tensor in a single file. All sub-commands run in one process without a GPU.

Exit codes: 0 success; 1 a checkpoint is broken, two compared checkpoints differ, or a download failed; 2 there is no
such checkpoint, or an argument is wrong.
"""

from __future__ import annotations

from hybridtron.limits import path_of
from hybridtron.problems import CommandParser


def main(arguments: list[str]) -> int:
    """Parse the command line and run the sub-command. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron checkpoint",
        description="List, verify, compare, average, reshard, fetch or convert checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (("list", "the checkpoints of a run"), ("verify", "read every byte")):
        command = commands.add_parser(name, help=about)
        command.add_argument("path", type=path_of, help="a run's folder, or one checkpoint")
    command = commands.add_parser("diff", help="list the differences of two checkpoints")
    command.add_argument("left", type=path_of)
    command.add_argument("right", type=path_of)
    command = commands.add_parser("average", help="write the mean of the weights of several checkpoints")
    command.add_argument("paths", nargs="+", type=path_of, metavar="CHECKPOINT", help="or RUN, or RUN@best")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the new checkpoint")
    command.add_argument("--weights", nargs="+", type=float, metavar="W", help="a weight for each; default: equal")
    command.add_argument("--ema", action="store_true", help="the mean of the moving averages (run.ema)")
    command = commands.add_parser("reshard", help="rewrite a checkpoint with full tensors")
    command.add_argument("path", type=path_of, metavar="CHECKPOINT", help="or a run's folder: its newest checkpoint")
    command.add_argument("output", type=path_of)
    command.add_argument("--file-size", default="4GB", help="size of each file, about; default: 4GB")
    command = commands.add_parser("export", help="write a folder for other programs")
    command.add_argument("path", type=path_of, metavar="CHECKPOINT", help="or a run's folder: its newest checkpoint")
    command.add_argument("output", type=path_of)
    command.add_argument("--to", choices=("dcp", "safetensors", "torch_dist"), required=True, help="the format")
    command = commands.add_parser("import", help="write a checkpoint from an export's folder")
    command.add_argument("path", type=path_of, metavar="FOLDER", help="written by checkpoint export or megatron-core")
    command.add_argument("output", type=path_of)
    command.add_argument("--heads", type=int, metavar="N", help="torch_dist: query heads")
    command.add_argument("--rope-base", type=float, metavar="BASE", help="torch_dist: base of rotary positions")
    command.add_argument("--norm-eps", type=float, metavar="EPS", help="torch_dist: epsilon of norms")
    command.add_argument("--tokenizer", type=path_of, metavar="DIR", help="torch_dist: folder with tokenizer.json")
    command = commands.add_parser("fetch", help="download a checkpoint from checkpoint.mirror")
    command.add_argument("url", help="a checkpoint in a mirror, or the mirror for its newest checkpoint")
    command.add_argument("run", type=path_of, help="the run's folder, which gets the checkpoint")
    chosen = parser.parse_args(arguments)
    from hybridtron.cli import checkpoint_commands

    return checkpoint_commands.run(chosen)
