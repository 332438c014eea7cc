"""What checkpoint.py does: each command from its arguments to an exit code."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.rewrite import differences, rewrite
from hybridtron.config.units import parse_bytes, readable
from hybridtron.problems import ConfigError
from hybridtron.train.lock import RunLock

WIDEST = 10**6  # characters


class Unusable(Exception):
    """There is nothing that could be looked at; the message says why."""


def run(chosen: argparse.Namespace) -> int:
    """Do what is asked. Returns the exit code."""
    does = {"list": listed, "verify": verified, "diff": compared, "reshard": resharded, "fetch": fetched}
    try:
        with warnings.catch_warnings(action="ignore"):
            return does[chosen.command](chosen)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2


def found(path: Path) -> list[Path]:
    """The checkpoints that a path names, the oldest first."""
    if not path.is_dir():
        raise Unusable(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
    of_run = folders.all_of(path)
    if not of_run and not (path / "manifest.json").exists():
        raise Unusable(
            f"{path} holds no checkpoint: give a run's folder, which has checkpoints/step-..., or one of these"
        )
    return of_run or [path]


def opened(path: Path) -> Checkpoint:
    """The checkpoint that a path names, or the newest of a run's."""
    try:
        return Checkpoint.open(found(path)[-1])
    except BrokenCheckpoint as error:
        raise Unusable(str(error)) from error


def size_of(option: str, text: str) -> int:
    """The bytes that an option is set to."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise Unusable(f"{option} {text}: {error}") from error


def not_there_yet(output: Path) -> Path:
    if output.exists():
        raise Unusable(f"{output} is there already; name a folder that is not")
    return output


def table_of(*columns: str) -> Table:
    """A table whose long entries go on in the next line, as names that are cut can't be told apart."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show(table: Table) -> None:
    """Print a table; where no terminal sets the width, each row in one line."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    console.print(table)


def listed(chosen: argparse.Namespace) -> int:
    table = table_of("step", "size", "held-out", "layout", "manifest")
    code = 0
    for path in found(chosen.path):
        try:
            one = Checkpoint.open(path)
        except BrokenCheckpoint as error:
            table.add_row(path.name, "", "", "", f"broken: {error}")
            code = 1
            continue
        size, meta = sum(file.size for file in one.manifest.files.values()), one.meta
        loss = "" if meta.validation is None else f"{meta.validation:.4f}"
        table.add_row(str(meta.step), f"{readable(size)}B", loss, meta.layout, "valid")
    show(table)
    for path in sorted((chosen.path / "checkpoints").glob("*-step-*")):  # superseded-, before that left-, and broken-
        print(f"archived: {path}")
    if fault := folders.pointer_fault(chosen.path):
        print(fault)
        code = 1
    return code


def verified(chosen: argparse.Namespace) -> int:
    code = 0
    of_run = (chosen.path / "checkpoints").is_dir()
    if of_run and (fault := folders.pointer_fault(chosen.path)):
        print(fault)
        code = 1
    for path in found(chosen.path):
        try:
            faults = list(Checkpoint.open(path).faults())
        except BrokenCheckpoint as error:
            faults = [str(error)]
        print("\n".join(faults) if faults else f"{path}: all well")
        code = 1 if faults else code
    return code


def compared(chosen: argparse.Namespace) -> int:
    table = table_of("", "left", "right")
    for one in differences(opened(chosen.left), opened(chosen.right)):
        table.add_row(one.what, one.left, one.right)
    if not table.row_count:
        print("the same")
        return 0
    show(table)
    return 1


def resharded(chosen: argparse.Namespace) -> int:
    size = size_of("--file-size", chosen.file_size)
    not_there_yet(chosen.output)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("files", total=None)
        try:
            source = opened(chosen.path)
            files = rewrite(source, chosen.output, size, lambda n, of: progress.update(bar, completed=n, total=of))
        except BrokenCheckpoint as error:
            print(error, file=sys.stderr)
            return 1
    print(f"{chosen.output}: step {source.meta.step}, {files} file{'' if files == 1 else 's'} of whole tensors")
    return 0


def fetched(chosen: argparse.Namespace) -> int:
    from hybridtron.checkpoint.mirror import TROUBLE, download  # imports boto3

    if not chosen.url.startswith("s3://"):
        raise Unusable(f"{chosen.url} is no mirror: give s3://BUCKET/PREFIX")
    try:
        with RunLock(chosen.run):  # or a run that is under way could take what is half there for one of its own
            print(f"{download(chosen.url, chosen.run)}: fetched, every byte as it was written")
    except (FileExistsError, ConfigError) as error:
        raise Unusable(str(error)) from error
    except (BrokenCheckpoint, *TROUBLE) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
