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

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds the package without installing it

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.config.architecture import parameter_table
from hybridtron.config.choices import Export as Wanted
from hybridtron.config.exportable import CannotExport, transformers_fault
from hybridtron.config.problems import ConfigError
from hybridtron.config.units import readable
from hybridtron.export.config_json import CannotImport
from hybridtron.export.export import Export, export, target_of
from hybridtron.export.native import Native
from hybridtron.export.sample import sample_size, verify_sample
from hybridtron.export.take_over import Source, same_tensors, take_over
from hybridtron.export.verify import DTYPES, NotTheSame, Proof, verify
from tools.checkpoint_commands import Unusable, found, not_there_yet, size_of


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked. Returns the exit code."""
    chosen = parsed(arguments)
    proving = chosen.command == "verify" or chosen.verify != "none"
    if proving and (fault := transformers_fault()) is not None:
        print(fault, file=sys.stderr)
        return 2
    try:
        return {"export": exported, "import": imported, "verify": verified}[chosen.command](chosen)
    except (Unusable, CannotExport, CannotImport, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except (BrokenCheckpoint, NotTheSame, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checkpoints to the format of Hugging Face, and back.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import|verify")
    command = commands.add_parser("export", help="write a folder that transformers loads")
    command.add_argument("--checkpoint", type=Path, required=True, help="one, or a run's folder for its newest")
    command.add_argument("--output", type=Path, required=True, help="the folder for transformers")
    command.add_argument("--target", choices=("auto", "native", "custom"), default="auto")
    command.add_argument("--dtype", choices=list(DTYPES), help="default: the checkpoint's own")
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


def newest_of(path: Path) -> Checkpoint:
    return Checkpoint.open(found(path)[-1])


def exported(chosen: argparse.Namespace) -> int:
    output = not_there_yet(chosen.output)
    size = size_of("--shard-size", chosen.shard_size)
    source = newest_of(chosen.checkpoint)
    model = source.config.model
    plan = Export(source, target_of(model, Wanted(chosen.target)), DTYPES.get(chosen.dtype), size)
    sizes = {
        "full": sum(parameter.size for parameter in parameter_table(model).values()),
        "sample": sample_size(model, plan.target),
        "none": 0,
    }
    needed = f"{readable(8 * sizes[chosen.verify])}B of weights at once, as --verify {chosen.verify}"
    print(f"{source.folder} -> {plan.target.name}; the proof will hold {needed}")
    proofs: list[Proof] = []

    def prove(folder: Path) -> None:
        if chosen.verify == "full":
            proofs.append(verify(folder, source))
        if chosen.verify == "sample":
            proofs.append(verify_sample(folder, source, plan.target))

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("weights", total=None)
        warnings = export(output, plan, prove, lambda done, of: progress.update(bar, completed=done, total=of))
    for warning in warnings:
        print(f"warning: {chosen.output}: {warning}", file=sys.stderr)
    said = f"logits apart by {proofs[0].logits:.1e} of the largest, at most" if proofs else "not verified"
    print(f"{chosen.output}: step {source.meta.step}, {said}")
    return 0


def imported(chosen: argparse.Namespace) -> int:
    output, source = not_there_yet(chosen.output), Source.open(chosen.input)

    def prove(checkpoint: Checkpoint) -> None:
        if chosen.verify == "full":
            same_tensors(source, checkpoint)
            if isinstance(source.kind, Native):
                verify(chosen.input, checkpoint)

    take_over(source, chosen.input, output, prove)
    tensors = f"{len(source.rules)} tensors of {source.kind.name}"
    start = f"model=of_weights run.weights={output} data=folder data.path=TOKENS"
    print(f"{output}: {tensors}; go on from there with {start}")
    return 0


def verified(chosen: argparse.Namespace) -> int:
    proof = verify(chosen.output, newest_of(chosen.checkpoint))
    lengths = ", ".join(map(str, proof.lengths))
    print(f"{chosen.output}: the same; logits of {lengths} tokens apart by {proof.logits:.1e} of the largest, at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
