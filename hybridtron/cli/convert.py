"""Take a checkpoint to the format of Hugging Face or back, and prove that it computes the same before it is there.

    python tools/convert.py export --checkpoint runs/samba --output samba-hf          the newest of a run, or one
    python tools/convert.py import --input mamba-130m-hf --output imported            then run.weights=imported
    python tools/convert.py verify --checkpoint runs/samba --output samba-hf          prove it again

Exported are safetensors in shards, config.json, the tokenizer, a model card, and a record of the checkpoint it was. A
model that transformers has no class of brings our class as files of its own, loaded with trust_remote_code=True. The
checkpoint is read from its files, whatever layout wrote it; neither a GPU nor other processes are needed. Imported are
the classes that can be exported to, and the format of state-spaces/mamba, into a checkpoint that any layout loads.

What is written appears whole, after it was proven: transformers loads the folder and answers with our logits and our
greedy continuation; an import gives each tensor back bit for bit besides. Otherwise nothing is left at the output. The
proof holds both models in fp32 at once. For a machine that is too small `--verify sample` takes the first and the last
layer of every kind, and `none` goes without.

Exit codes: 0 done, 1 the proof failed or the checkpoint is broken, 2 wrong arguments, or a model that no class has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridtron.config.exportable import transformers_fault


def main(arguments: list[str]) -> int:
    """Do what is asked. Returns the exit code."""
    chosen = parsed(arguments)
    proving = chosen.command == "verify" or chosen.verify != "none"
    if proving and (fault := transformers_fault()) is not None:
        print(fault, file=sys.stderr)
        return 2
    from hybridtron.cli import convert_commands

    return convert_commands.run(chosen)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checkpoints to the format of Hugging Face, and back.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import|verify")
    command = commands.add_parser("export", help="write a folder that transformers loads")
    command.add_argument("--checkpoint", type=Path, required=True, help="one, or a run's folder for its newest")
    command.add_argument("--output", type=Path, required=True, help="the folder for transformers")
    command.add_argument("--target", choices=("auto", "native", "custom"), default="auto")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's own")
    command.add_argument("--shard-size", default="5GB", help="bytes of a file; default: %(default)s")
    command.add_argument("--verify", choices=("full", "sample", "none"), default="full")
    command = commands.add_parser("import", help="write a checkpoint for run.weights")
    command.add_argument("--input", type=Path, required=True, help="a folder of transformers, or of state-spaces/mamba")
    command.add_argument("--output", type=Path, required=True, help="the checkpoint")
    command.add_argument("--verify", choices=("full", "none"), default="full")
    command = commands.add_parser("verify", help="prove an export again")
    command.add_argument("--checkpoint", type=Path, required=True, help="one, or a run's folder for its newest")
    command.add_argument("--output", type=Path, required=True, help="the folder for transformers")
    return parser.parse_args(arguments)
