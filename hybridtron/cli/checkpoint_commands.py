"""Sub-commands of `hybridtron checkpoint`. Each function takes the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint.average import average, shares_of
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.exchange import take_back, write_out
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.checkpoint.mirror import download
from hybridtron.checkpoint.rewrite import differences, rewrite
from hybridtron.cli.arguments import bytes_of, checkpoints_at, not_there_yet
from hybridtron.config.units import readable
from hybridtron.config.weights import BEST
from hybridtron.interop.core_folder import (
    FORMAT,
    CoreOptions,
    is_core_folder,
    open_core_folder,
    tokenizer_folder,
    write_core_folder,
)
from hybridtron.interop.import_folder import same_tensors, take_over
from hybridtron.problems import Unusable
from hybridtron.progress import progress_bar
from hybridtron.storage.retry import StorageError
from hybridtron.train.lock import RunLock

WIDEST = 10**6  # maximum characters in a table's row if stdout is not a terminal


def run(chosen: argparse.Namespace) -> int:
    """Run the chosen sub-command. Returns the exit code."""
    commands = {
        "list": list_checkpoints,
        "verify": verify_checkpoints,
        "diff": print_differences,
        "average": average_checkpoints,
        "reshard": reshard_checkpoint,
        "export": export_checkpoint,
        "import": import_checkpoint,
        "fetch": fetch_checkpoint,
    }
    with warnings.catch_warnings(action="ignore"):
        return commands[chosen.command](chosen)


def open_newest(path: Path) -> Checkpoint:
    """Open a checkpoint, or a run's newest checkpoint. Raises Unusable if the checkpoint is missing or broken."""
    try:
        return Checkpoint.open(checkpoints_at(path)[-1])
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error


def open_named(path: Path) -> Checkpoint:
    """Open a checkpoint, a run's newest checkpoint, or for RUN@best the run's checkpoint with the lowest held-out loss.

    Raises Unusable if there is no such checkpoint, or if it is broken.
    """
    if not path.name.endswith(BEST):
        return open_newest(path)
    run = path.with_name(path.name.removesuffix(BEST))
    checkpoints_at(run)
    checkpoint = folders.best(run)
    if checkpoint is None:
        raise Unusable(
            f"{run} has no checkpoint with a held-out loss, which is measured only at evaluation steps "
            "(run.eval_every): name a checkpoint's folder",
            code="no-file",
        )
    return checkpoint


def table_of(*columns: str) -> Table:
    """Build a table that wraps long entries. In truncated entries, two names could look equal."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show(table: Table) -> None:
    """Print a table. If stdout is not a terminal, each row is one line of any width."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    console.print(table)


def list_checkpoints(chosen: argparse.Namespace) -> int:
    """Print a run's checkpoints and archived folders.

    Returns 1 if a manifest, or the file that names the newest checkpoint, is broken.
    """
    table = table_of("step", "size", "held-out", "layout", "manifest")
    code = 0
    for path in checkpoints_at(chosen.path):
        try:
            checkpoint = Checkpoint.open(path)
        except BrokenCheckpoint as error:
            table.add_row(path.name, "", "", "", f"broken: {error}")
            code = 1
            continue
        size = sum(file.size for file in checkpoint.manifest.files.values())
        meta = checkpoint.meta
        if meta.validation is None:
            loss = ""
        else:
            loss = f"{meta.validation:.4f}"
        table.add_row(str(meta.step), f"{readable(size)}B", loss, meta.layout, "valid")
    show(table)
    for path in sorted(
        (chosen.path / "checkpoints").glob("*-step-*")
    ):  # prefixes: superseded-, broken-; old versions also wrote left-
        print(f"archived: {path}")
    if fault := folders.pointer_fault(chosen.path):
        print(fault)
        code = 1
    return code


def verify_checkpoints(chosen: argparse.Namespace) -> int:
    """Read every byte of the checkpoints and print the faults. Returns 1 if there is a fault."""
    code = 0
    is_run = (chosen.path / "checkpoints").is_dir()
    if is_run and (fault := folders.pointer_fault(chosen.path)):
        print(fault)
        code = 1
    for path in checkpoints_at(chosen.path):
        try:
            faults = list(Checkpoint.open(path).faults())
        except BrokenCheckpoint as error:
            faults = [str(error)]
        print("\n".join(faults) if faults else f"{path}: no fault")
        code = 1 if faults else code
    return code


def print_differences(chosen: argparse.Namespace) -> int:
    """Print the differences between two checkpoints. Returns 1 if there is a difference."""
    table = table_of("", "left", "right")
    for difference in differences(open_newest(chosen.left), open_newest(chosen.right)):
        table.add_row(difference.what, difference.left, difference.right)
    if not table.row_count:
        print("the checkpoints do not differ")
        return 0
    show(table)
    return 1


def average_checkpoints(chosen: argparse.Namespace) -> int:
    """Write the mean of the weights of several checkpoints, or of their moving averages, and print the share of each.

    Returns 1 if a checkpoint turns out to be broken while it is read.
    """
    factors = _factors(chosen)
    not_there_yet(chosen.output)
    sources = [open_named(path) for path in chosen.paths]
    try:
        with progress_bar("files") as report_progress:
            averaged = average(sources, factors, chosen.output, report_progress, of_averages=chosen.ema)
    except BrokenCheckpoint as error:
        print(error, file=sys.stderr)
        return 1
    table = table_of("checkpoint", "step", "share")
    for source, share in zip(sources, shares_of(factors), strict=True):
        table.add_row(str(source.folder), str(source.meta.step), f"{share:.4f}")
    show(table)
    weights = f"{averaged.weights} weights, {averaged.masters} with fp32 masters"
    start = f"to train from it use run.weights={chosen.output}"
    whose = "checkpoints"
    if chosen.ema:
        whose = "moving averages"
    if averaged.plain:
        weights = f"{weights}, {averaged.plain} without a moving average (a mean of the weights themselves)"
    print(f"{chosen.output}: mean of {len(sources)} {whose}, {weights}; {start}")
    return 0


def _factors(chosen: argparse.Namespace) -> list[float]:
    """Return a factor for each averaged checkpoint. Raises Unusable if --weights or the checkpoints can't be used."""
    count = len(chosen.paths)
    if count < 2:
        raise Unusable(f"{chosen.paths[0]} is the only checkpoint: name at least two to average", code="missing")
    if chosen.weights is None:
        return [1.0] * count
    if len(chosen.weights) != count:
        raise Unusable(
            f"--weights has {len(chosen.weights)} numbers for {count} checkpoints: give one for each",
            code="wrong-type",
        )
    if wrong := [factor for factor in chosen.weights if not (math.isfinite(factor) and factor > 0)]:
        raise Unusable(f"--weights has {wrong[0]}, must have finite numbers above 0", code="out-of-range")
    return chosen.weights


def reshard_checkpoint(chosen: argparse.Namespace) -> int:
    """Write a copy of a checkpoint in which every tensor is stored whole, not in shards.

    Returns 1 if a file turns out to be broken while it is copied.
    """
    size = bytes_of("--file-size", chosen.file_size)
    not_there_yet(chosen.output)
    source = open_newest(chosen.path)
    try:
        with progress_bar("files") as report_progress:
            files = rewrite(source, chosen.output, size, report_progress)
    except BrokenCheckpoint as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{chosen.output}: step {source.meta.step}, {files} file{'' if files == 1 else 's'} with full tensors")
    return 0


def export_checkpoint(chosen: argparse.Namespace) -> int:
    """Write a checkpoint in a format of other programs. Returns 1 if a file turns out to be broken."""
    not_there_yet(chosen.output)
    source = open_newest(chosen.path)
    try:
        if chosen.to == FORMAT:
            count = write_core_folder(merge_adapters(source), chosen.output)
        else:
            count = write_out(source, chosen.output, chosen.to)
    except BrokenCheckpoint as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{chosen.output}: step {source.meta.step}, {count} tensors for {chosen.to}")
    return 0


def import_checkpoint(chosen: argparse.Namespace) -> int:
    """Write a checkpoint from an export's folder."""
    not_there_yet(chosen.output)
    if is_core_folder(chosen.path):
        return _import_from_core(chosen)
    options = {"--heads": chosen.heads, "--rope-base": chosen.rope_base, "--norm-eps": chosen.norm_eps}
    for option, value in {**options, "--tokenizer": chosen.tokenizer}.items():
        if value is not None:
            raise Unusable(f"{option} is for folders of megatron-core, not for {chosen.path}", code="no-effect")
    meta = take_back(chosen.path, chosen.output)
    print(f"{chosen.output}: checkpoint of step {meta.step}")
    return 0


def _import_from_core(chosen: argparse.Namespace) -> int:
    """Write a checkpoint from a folder of megatron-core, and check that its tensors equal the folder's."""
    tokenizer = tokenizer_folder(chosen.path, chosen.tokenizer)
    source = open_core_folder(chosen.path, CoreOptions(chosen.heads, chosen.rope_base, chosen.norm_eps), tokenizer)
    take_over(source, tokenizer, chosen.output, lambda checkpoint: same_tensors(source, checkpoint))
    print(f"{chosen.output}: {len(source.rules)} tensors of {source.kind.name}")
    if source.dropped:
        print(f"{chosen.output}: without {' and '.join(source.dropped)}, which {chosen.path} has")
    return 0


def fetch_checkpoint(chosen: argparse.Namespace) -> int:
    """Download a checkpoint from an S3 mirror into a run's folder.

    Returns 1 if the checkpoint is broken or the download fails.
    """
    if not chosen.url.startswith("s3://"):
        raise Unusable(f"{chosen.url} is not the URL of a mirror: use s3://BUCKET/PREFIX", code="malformed")
    try:
        with RunLock(chosen.run):  # without the lock, a run in this folder would delete the download's temporary folder
            print(f"{download(chosen.url, chosen.run)}: downloaded; all bytes match the manifest")
    except FileExistsError as error:
        raise Unusable(str(error), code="exists") from error
    except (BrokenCheckpoint, OSError, StorageError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
