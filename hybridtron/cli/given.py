"""Arguments shared by several commands: checkpoints, sizes and output folders; and a progress bar.

A bad argument raises Unusable with advice on what would work.
"""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridtron.config.exportable import RECORD
from hybridtron.config.units import parse_bytes
from hybridtron.problems import Unusable

EVERY = 30.0  # seconds between lines of progress where there is no terminal


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints at a path: the path itself, or all of a run, oldest first. Raises Unusable."""
    require_folder(path, "checkpoint")
    if (path / "manifest.json").exists():
        return [path]
    if (path / "config.json").exists():
        if (path / RECORD).exists():
            kind = "an export"
        else:
            kind = "a model for transformers"
        cure = f"`hybridtron import {path} --output DIR` makes a checkpoint of it, to be named here"
        raise Unusable(f"{path} is {kind}, not a run nor a checkpoint: {cure}", code="unreadable")
    from hybridtron.checkpoint import folder  # imports torch, which a wrong path does without

    if checkpoints := folder.all_of(path):
        return checkpoints
    cure = "give a run's folder, which has checkpoints/step-..., or one of these"
    raise Unusable(
        f"{path} has no checkpoint: {cure}. A run writes its first one after checkpoint.every steps.", code="no-file"
    )


def require_folder(path: Path, use: str) -> None:
    """Raise Unusable if a path is not a folder.

    If it may be a model's name on the Hugging Face Hub, the message has the commands that download it; `use` says if it
    must then be imported as a checkpoint.
    """
    if path.is_dir():
        return
    if path.exists():
        raise Unusable(f"{path} is not a folder", code="unreadable")
    parts = path.parts
    if len(parts) != 2 or path.is_absolute() or Path(parts[0]).exists() or parts[0].startswith("."):
        raise Unusable(f"{path} does not exist", code="no-file")
    cure = f"`hf download {path} --local-dir {parts[1]}` gets it"
    if use == "checkpoint":
        cure = f"{cure}, and `hybridtron import {parts[1]} --output DIR` makes a checkpoint of it"
    raise Unusable(
        f"{path} does not exist. Nothing is fetched from a hub; if it is a model's name there, {cure}", code="no-file"
    )


def importable(path: Path) -> Path:
    """Return the path if it is a folder to import from. Raises Unusable if it is missing or holds checkpoints."""
    require_folder(path, "import")
    if (path / "manifest.json").exists() or (path / "checkpoints").is_dir():
        cure = f"run.weights={path} starts from it, and `hybridtron export {path} --output DIR` writes a model"
        raise Unusable(
            f"{path} holds checkpoints already, and needs no import: {cure} for transformers", code="unsupported"
        )
    return path


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path: the path itself, or a run's newest valid one. Raises Unusable."""
    checkpoints = checkpoints_at(path)
    if checkpoints == [path]:
        return path
    from hybridtron.checkpoint.folder import newest

    checkpoint = newest(path)
    if checkpoint is None:
        raise Unusable(
            f"{path} has no valid checkpoint; `hybridtron checkpoint verify {path}` says why", code="unreadable"
        )
    return checkpoint.folder


def positive(text: str) -> int:
    """Parse a positive whole number, for argparse."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def bytes_of(option: str, text: str) -> int:
    """Parse an option's value such as `4GB` to bytes. Raises Unusable."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise Unusable(f"{option} {text}: {error}", code="malformed") from error


def not_there_yet(output: Path) -> Path:
    """Return the path of an output folder. Raises Unusable if it exists."""
    if output.exists():
        raise Unusable(f"{output} already exists; name a folder that does not", code="exists")
    return output


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress with the time left: a bar on a terminal, else a line every 30 s. Both go to stderr.

    The block gets a function to call with the number done and the total.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield _in_lines(what, console)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(bar, completed=done, total=of)


def _in_lines(what: str, console: Console) -> Callable[[int, int], None]:
    """Return a function that prints progress as plain lines, at most one every EVERY seconds."""
    started = reported = time.monotonic()

    def moved(done: int, of: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > EVERY and done:
            reported = now
            time_left = timedelta(seconds=round((now - started) * (of - done) / done))
            console.print(f"{what}: {done} of {of}, {time_left} left")

    return moved
