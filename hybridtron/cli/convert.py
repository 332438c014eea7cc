"""Export checkpoints to the format of Hugging Face, or import from it, with a proof that the model is unchanged.

    hybridtron export runs/samba --output samba-hf                  a run's newest checkpoint, or one
    hybridtron export runs/samba --output samba-hf --verify only    prove it again
    hybridtron export runs/tuned --base samba-hf --output tuned     adapters for peft
    hybridtron import mamba-130m-hf --output imported               then run.weights=imported
    hybridtron import tuned --base samba-hf --output imported       an adapter of peft, with its base

An export holds safetensors in shards, config.json, the tokenizer, a model card, and a record of its checkpoint. If
transformers has no class for the model, the export includes our class as source files, which transformers loads with
trust_remote_code=True. The checkpoint may come from any layout; no GPU and no other processes are needed. An import
reads the classes that exports can have, and the format of state-spaces/mamba. It writes a checkpoint that any layout
loads.

The output appears complete or not at all, and only after a proof: transformers must load the folder and give our logits
and our greedy continuation. For an import, each tensor must also convert back bit for bit. The proof holds both models
in fp32 at once. If memory is too small, `--verify sample` proves the first and the last layer of every kind, and
`--verify none` skips the proof.

Exit codes: 0 done, 1 the proof failed or the checkpoint is broken, 2 wrong arguments, a model that fits no class, or a
full disk.
"""

from __future__ import annotations

import argparse
import sys

from hybridtron.config.exportable import transformers_fault
from hybridtron.limits import path_of


def export_main(arguments: list[str]) -> int:
    """Run `hybridtron export`. Returns the exit code."""
    return main(["export", *arguments])


def import_main(arguments: list[str]) -> int:
    """Run `hybridtron import`. Returns the exit code."""
    return main(["import", *arguments])


def main(arguments: list[str]) -> int:
    """Parse the command line and run `export`, `import` or `verify`. Returns the exit code."""
    chosen = parsed(arguments)
    proving = chosen.command == "verify" or chosen.verify != "none"
    if proving and (fault := transformers_fault()) is not None:
        print(fault, file=sys.stderr)
        return 2
    from hybridtron.cli import convert_commands

    return convert_commands.run(chosen)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. `--checkpoint` and `--input` are older forms of the positional arguments."""
    parser = argparse.ArgumentParser(
        prog="hybridtron", description="Checkpoints to the format of Hugging Face, and back."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import|verify")
    command = commands.add_parser("export", help="write a folder that transformers loads")
    _add_source(command, "checkpoint", "a checkpoint, or a run's folder for its newest")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the folder for transformers")
    command.add_argument("--target", choices=("auto", "native", "custom"), default="auto")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's own")
    command.add_argument("--base", type=path_of, metavar="DIR", help="write adapters for peft, beside this model")
    command.add_argument("--shard-size", default="5GB", help="bytes of a file; default: %(default)s")
    command.add_argument("--verify", choices=("full", "sample", "none", "only"), default="full")
    command = commands.add_parser("import", help="write a checkpoint for run.weights")
    _add_source(command, "input", "a folder of transformers, of peft, or of state-spaces/mamba")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the checkpoint")
    command.add_argument("--base", type=path_of, metavar="DIR", help="of an adapter of peft: the model that it is for")
    command.add_argument("--verify", choices=("full", "none"), default="full")
    command = commands.add_parser("verify", help="prove an export again")
    _add_source(command, "checkpoint", "a checkpoint, or a run's folder for its newest")
    command.add_argument("--output", type=path_of, required=True, metavar="DIR", help="the folder for transformers")
    chosen = parser.parse_args(arguments)
    chosen.source = chosen.source or chosen.named
    if chosen.command == "export" and chosen.verify == "only":
        chosen.command = "verify"
    return chosen


def _add_source(command: argparse.ArgumentParser, name: str, what: str) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", type=path_of, metavar=name.upper(), help=what)
    source.add_argument(f"--{name}", dest="named", type=path_of, help=argparse.SUPPRESS)
