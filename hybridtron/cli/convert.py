"""Export checkpoints to the format of Hugging Face, or import from it, with a check that the model is unchanged.

    hybridtron export runs/samba --output samba-hf                  export a run's newest checkpoint
    hybridtron export runs/samba --output samba-hf --verify only    check an existing export again
    hybridtron export runs/tuned --base samba-hf --output tuned     export only the adapters, in peft's format
    hybridtron export runs/samba --ema --output samba-ema           export the moving average of the weights (run.ema)
    hybridtron import mamba-130m-hf --output imported               import a model; train with run.weights=imported
    hybridtron import hf:OWNER/NAME --output imported               download a model from the Hub, and import it
    hybridtron import tuned --base samba-hf --output imported       import an adapter of peft and its base model

An export contains safetensors files, config.json, the tokenizer, a model card, and a record of its checkpoint. If
transformers has no class for the model, the export also contains this package's model class as source files, which
transformers loads with trust_remote_code=True. Checkpoints of any parallel layout can be exported, in one process
without a GPU.

An import reads every model class that an export can have, and the format of state-spaces/mamba. It writes a checkpoint
that any parallel layout loads.

The output folder is created only after a check that it contains the same model. For the check, transformers loads the
folder, and its logits and greedy continuation must match this package's logits and continuation. For an import,
conversion back must also give every tensor's original bits. The check needs memory for both models at the same time, in
fp32. If memory is too small, `--verify sample` checks only the first and the last layer of every kind. `--verify none`
skips the check.

Exit codes: 0 done, 1 the check failed or the checkpoint is broken, 2 wrong arguments, a model that fits no class, or a
full disk.
"""

from __future__ import annotations

import argparse
import sys

from hybridtron.config.export_class import transformers_fault
from hybridtron.config.hf_compat import NATIVE
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser


def export_main(arguments: list[str]) -> int:
    """Run `hybridtron export`. Returns the exit code."""
    return main(["export", *arguments])


def import_main(arguments: list[str]) -> int:
    """Run `hybridtron import`. Returns the exit code."""
    return main(["import", *arguments])


def main(arguments: list[str]) -> int:
    """Parse the command line and run `export`, `import` or `verify`. Returns the exit code."""
    chosen = parse(arguments)
    loads_transformers = chosen.command == "verify" or chosen.verify != "none"
    if loads_transformers and (fault := transformers_fault()) is not None:
        print(fault, file=sys.stderr)
        return 2
    from hybridtron.cli import convert_commands

    return convert_commands.run(chosen)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line.

    The hidden options `--checkpoint` and `--input` are former names of the positional arguments.
    """
    parser = CommandParser(prog="hybridtron", description="Convert checkpoints to Hugging Face format, and back.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import|verify")
    command = commands.add_parser("export", help="write a folder that transformers loads")
    _add_source(command, "checkpoint", "a checkpoint, or a run's folder for its newest")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the folder for transformers")
    targets = ("auto", "native", "custom", *NATIVE)
    command.add_argument("--target", choices=targets, default="auto", metavar="{auto,native,custom,CLASS}")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's dtype")
    command.add_argument("--base", type=path_of, metavar="DIR", help="adapters for peft; DIR: the base model")
    _add_ema(command)
    command.add_argument("--shard-size", default="5GB", help="maximum size of a file; default: %(default)s")
    command.add_argument("--verify", choices=("full", "sample", "none", "only"), default="full")
    command = commands.add_parser("import", help="write a checkpoint for run.weights")
    _add_source(command, "input", "a folder of transformers, of peft, or of state-spaces/mamba; or hf:OWNER/NAME")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the checkpoint")
    command.add_argument("--base", type=path_of, metavar="DIR", help="for an adapter of peft: its base model")
    command.add_argument("--verify", choices=("full", "none"), default="full")
    command = commands.add_parser("verify", help="check an existing export again")
    _add_source(command, "checkpoint", "a checkpoint, or a run's folder for its newest")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the folder for transformers")
    _add_ema(command)
    chosen = parser.parse_args(arguments)
    chosen.source = chosen.source or chosen.named
    if chosen.command == "export" and chosen.verify == "only":
        chosen.command = "verify"
    return chosen


def _add_source(command: CommandParser, name: str, what: str) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", type=path_of, metavar=name.upper(), help=what)
    source.add_argument(f"--{name}", dest="named", type=path_of, help=argparse.SUPPRESS)


def _add_ema(command: CommandParser) -> None:
    command.add_argument("--ema", action="store_true", help="the moving average of the weights, which run.ema keeps")
