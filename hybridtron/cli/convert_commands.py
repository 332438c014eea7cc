"""The commands `hybridtron export`, `import` and `verify`: functions from parsed arguments to an exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.checkpoint.moving_average import moving_average
from hybridtron.cli.arguments import bytes_of, checkpoints_at, importable, not_there_yet
from hybridtron.cli.downloads import download_folder, with_progress
from hybridtron.config.choices import Export as Wanted
from hybridtron.config.hf_compat import NATIVE
from hybridtron.config.units import readable
from hybridtron.data.pre_tokenizers import known_name
from hybridtron.device import DTYPES as FORWARD_DTYPES
from hybridtron.file_errors import in_words, is_of_the_user
from hybridtron.interop.consumers import summary_of
from hybridtron.interop.export import DTYPES, ExportPlan, export, target_of
from hybridtron.interop.import_folder import ImportFolder, same_tensors, take_over
from hybridtron.interop.native import Native
from hybridtron.interop.peft_adapter import export_adapter
from hybridtron.interop.peft_import import adapted_folder, is_adapter_folder, prove_adapter
from hybridtron.interop.reader import Weights
from hybridtron.interop.sample import sample_size, verify_sample
from hybridtron.interop.verify import NotTheSame, Proof, verify
from hybridtron.problems import Unusable
from hybridtron.progress import progress_bar
from hybridtron.storage.published import HUB, MODELS

MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")  # of a model on the Hub


def run(chosen: argparse.Namespace) -> int:
    """Run the chosen command, and print expected errors. Returns the exit code.

    The code is 2 if the user can correct the cause, else 1.
    """
    try:
        return {"export": export_checkpoint, "import": import_model, "verify": verify_export}[chosen.command](chosen)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except (BrokenCheckpoint, NotTheSame) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(in_words(error, chosen.output), file=sys.stderr)
        return 2 if is_of_the_user(error) else 1


def opened(chosen: argparse.Namespace) -> Checkpoint:
    """Open a checkpoint, or a run's newest checkpoint. With --ema, open the moving average of its weights."""
    checkpoint = Checkpoint.open(checkpoints_at(chosen.source)[-1])
    if chosen.ema:
        return moving_average(checkpoint)
    return checkpoint


def dtype_of(chosen: argparse.Namespace, source: Checkpoint) -> torch.dtype | None:
    """Return the dtype of an export, or None if each tensor keeps the dtype that it has in the checkpoint.

    The moving average is stored in fp32, but is exported in the dtype of the forward pass, like the weights.
    """
    if chosen.dtype is None and chosen.ema:
        return FORWARD_DTYPES[source.config.precision.name]
    return DTYPES.get(chosen.dtype)


def export_checkpoint(chosen: argparse.Namespace) -> int:
    """Export a checkpoint, and check that transformers computes the same logits from the export.

    With `--base` only the adapters are exported, in peft's format.
    """
    output = not_there_yet(chosen.output)
    size = bytes_of("--shard-size", chosen.shard_size)
    if chosen.base is not None:
        layers = export_adapter(opened(chosen), chosen.base, output)
        print(f"{output}: adapters of {layers} layers for peft, with the base model {chosen.base}")
        return 0
    source = merge_adapters(opened(chosen))
    arch = source.plan.arch
    if chosen.target in NATIVE:
        target = target_of(arch, Wanted.native, chosen.target)
    else:
        target = target_of(arch, Wanted(chosen.target))
    plan = ExportPlan(source, target, dtype_of(chosen, source), size, chosen.ema)
    sizes = {
        "full": sum(parameter.size for parameter in arch.table.values()),
        "sample": sample_size(arch, plan.target),
        "none": 0,
    }
    needed = f"{readable(8 * sizes[chosen.verify])}B of memory for weights (--verify {chosen.verify})"
    print(f"{source.folder} -> {plan.target.name}; the check will need {needed}")
    proofs: list[Proof] = []

    def prove(folder: Path) -> None:
        if chosen.verify == "full":
            proofs.append(verify(folder, source))
        if chosen.verify == "sample":
            proofs.append(verify_sample(folder, source, plan.target))

    with progress_bar("weights") as report_progress:
        warnings = export(output, plan, prove, report_progress)
    for warning in warnings:
        print(f"warning: {chosen.output}: {warning}", file=sys.stderr)
    if proofs:
        outcome = f"logits differ by at most {proofs[0].logits:.1e} of the largest"
    else:
        outcome = "not verified"
    average = ", moving average" if chosen.ema else ""
    print(f"{chosen.output}: step {source.meta.step}{average}, {outcome}")
    print(f"{chosen.output}: {summary_of(output)}")
    if (splits_by := known_name((output / "tokenizer.json").read_bytes())) is not None:
        print(f"{chosen.output}: if llama.cpp does not know the tokenizer, its pre-tokenizer is {splits_by}")
    return 0


def import_model(chosen: argparse.Namespace) -> int:
    """Import a model, or an adapter of peft, as a checkpoint, and check that the model is unchanged."""
    output = not_there_yet(chosen.output)
    if str(chosen.source).startswith(HUB):
        folder = download_folder(output)
        with_progress(str(chosen.source), folder, MODELS, MODEL_FILES)
        chosen.source = folder
    importable(chosen.source)
    if chosen.base is not None or is_adapter_folder(chosen.source):
        return _import_adapter(chosen, output)
    source = ImportFolder.open(chosen.source)

    def prove(checkpoint: Checkpoint) -> None:
        if chosen.verify == "full":
            same_tensors(source, checkpoint)
            if isinstance(source.kind, Native):
                warn_of(chosen.source, verify(chosen.source, checkpoint))

    take_over(source, chosen.source, output, prove)
    tensors = f"{len(source.rules)} tensors of {source.kind.name}"
    start = f"model=from_checkpoint run.weights={output} data=folder data.path=TOKENS"
    print(f"{output}: {tensors}; to train from this checkpoint use {start}")
    if source.dropped:
        print(f"{output}: without {' and '.join(source.dropped)}, which {chosen.source} has")
    return 0


def _import_adapter(chosen: argparse.Namespace, output: Path) -> int:
    source, home = adapted_folder(chosen.source, chosen.base)
    take_over(
        source, home, output, lambda checkpoint: prove_adapter(source, checkpoint) if chosen.verify == "full" else None
    )
    layers = f"adapters of {len(source.adapted)} layers, and {len(source.saved)} tensors that were saved in full"
    print(f"{output}: {layers}, with the base model {source.kind.name} in {source.weights.folder}")
    return 0


def verify_export(chosen: argparse.Namespace) -> int:
    """Check again that transformers computes the same logits from an existing export."""
    Weights(chosen.output)  # raises CannotImport if weights are missing or can't be read
    proof = verify(chosen.output, merge_adapters(opened(chosen)))
    lengths = ", ".join(map(str, proof.lengths))
    print(
        f"{chosen.output}: same model; logits of {lengths} tokens differ by at most {proof.logits:.1e} of the largest"
    )
    warn_of(chosen.output, proof)
    return 0


def warn_of(folder: Path, proof: Proof) -> None:
    """Print a proof's caution, unless the caution is empty."""
    if proof.caution:
        print(f"warning: {folder}: {proof.caution}", file=sys.stderr)
