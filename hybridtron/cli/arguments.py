"""Checks of arguments that several commands share (checkpoints, sizes, output folders).

For an argument that can't be used, the functions raise Unusable. Its message names the fault and, where possible, a
working alternative.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from hybridtron.config.export_class import RECORD
from hybridtron.config.units import parse_bytes
from hybridtron.problems import Unusable


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint folders at a path, the oldest first.

    For a checkpoint's folder the list contains only this folder. For a run's folder it contains all checkpoints of the
    run. Raises Unusable if there is no checkpoint.
    """
    require_folder(path, "checkpoint")
    if (path / "manifest.json").exists():
        return [path]
    if (path / "config.json").exists():
        if (path / RECORD).exists():
            kind = "an export"
        else:
            kind = "a model for transformers"
        cure = f"run `hybridtron import {path} --output DIR`, then name DIR in place of {path}"
        raise Unusable(f"{path} is {kind}, neither a run nor a checkpoint: {cure}", code="unreadable")
    from hybridtron.checkpoint import folder  # imports torch, which takes seconds; wrong paths are reported above

    if checkpoints := folder.all_of(path):
        return checkpoints
    cure = "name a run's folder, which contains checkpoints/step-..., or the folder of one checkpoint"
    raise Unusable(
        f"{path} has no checkpoint: {cure}. A run writes its first checkpoint after checkpoint.every steps.",
        code="no-file",
    )


def require_folder(path: Path, use: str) -> None:
    """Raise Unusable if a path is not a folder.

    If the path could be a model name on the Hugging Face Hub, such as `org/model`, the message contains the command
    that downloads the model. With use="checkpoint" the message also contains the command that imports the download as a
    checkpoint.
    """
    if path.is_dir():
        return
    if path.exists():
        raise Unusable(f"{path} is not a folder", code="unreadable")
    parts = path.parts
    if len(parts) != 2 or path.is_absolute() or Path(parts[0]).exists() or parts[0].startswith("."):
        raise Unusable(f"{path} does not exist", code="no-file")
    cure = f"download the model with `hf download {path} --local-dir {parts[1]}`"
    if use == "checkpoint":
        cure = f"{cure}, and make a checkpoint with `hybridtron import {parts[1]} --output DIR`"
    raise Unusable(
        f"{path} does not exist. This command downloads nothing; if {path} is on the Hugging Face Hub, {cure}",
        code="no-file",
    )


def importable(path: Path) -> Path:
    """Return `path`, a folder to import from.

    Raises Unusable if the folder is missing, or contains checkpoints of this package, which need no import.
    """
    require_folder(path, "import")
    if (path / "manifest.json").exists() or (path / "checkpoints").is_dir():
        cure = f"train with run.weights={path}, or use `hybridtron export {path} --output DIR` to write a model"
        raise Unusable(
            f"{path} already contains checkpoints of hybridtron: {cure} for transformers", code="unsupported"
        )
    return path


def newest_checkpoint(path: Path) -> Path:
    """Return the folder of the newest valid checkpoint of a run.

    If the path is a checkpoint's own folder, it is returned unchecked. Raises Unusable if there is no valid checkpoint.
    """
    checkpoints = checkpoints_at(path)
    if checkpoints == [path]:
        return path
    from hybridtron.checkpoint.folder import newest

    checkpoint = newest(path)
    if checkpoint is None:
        raise Unusable(
            f"{path} has no valid checkpoint; `hybridtron checkpoint verify {path}` lists the faults", code="unreadable"
        )
    return checkpoint.folder


def positive(text: str) -> int:
    """Parse a positive whole number, for argparse."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def bytes_of(option: str, text: str) -> int:
    """Parse an option's value such as `4GB` to bytes. Raises Unusable if the value is malformed."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise Unusable(f"{option} {text}: {error}", code="malformed") from error


def not_there_yet(output: Path) -> Path:
    """Return `output`, a folder to create. Raises Unusable if it already exists."""
    if output.exists():
        raise Unusable(f"{output} already exists: name a folder that does not exist", code="exists")
    return output
