"""Checkpoints in formats of other programs: torch's distributed checkpoint (DCP), and plain safetensors files.

Both have every tensor whole, under our key: weights, fp32 masters, moments of the optimizer and states. Beside them are
config.yaml, tokenizer.json and `hybridtron_checkpoint.json`, which has the step and the file of each tensor in our own
format. So `take_back` writes a checkpoint that equals the source.

    dcp           a folder that `torch.distributed.checkpoint.load` reads, on any number of ranks. While it is written,
                  all tensors are in memory. Its file `.metadata` is a pickle, of which `take_back` reads descriptions
                  of tensors only (`dcp_metadata.py`)
    safetensors   one file for each kind of tensor and about 4 GB, written one file at a time
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.dcp_metadata import METADATA
from hybridtron.checkpoint.dcp_reader import DcpTensors
from hybridtron.checkpoint.files import appearing
from hybridtron.checkpoint.manifest import Meta
from hybridtron.checkpoint.rewrite import planned_files, write_whole
from hybridtron.nested import NotParsed, json_of
from hybridtron.problems import Unusable, first_line
from hybridtron.safe_open import Unreadable, read_regular

FORMATS = ("dcp", "safetensors")
RECORD = "hybridtron_checkpoint.json"
SMALL = ("config.yaml", "tokenizer.json")
FILE_BYTES = 4 * 10**9
MAX_SMALL_BYTES = 2**30
FILE_NAME = re.compile(r"[a-z]+-\d{5}\.safetensors")


def write_out(source: Checkpoint, target: Path, format_name: str) -> int:
    """Write a checkpoint in another format; return how many tensors it has.

    The folder `target` appears complete or not at all. Raises BrokenCheckpoint if the source is damaged.
    """
    files = dict(planned_files(source, FILE_BYTES))
    with appearing(target) as temporary:
        if format_name == "dcp":
            state = {key: source.whole(key) for key in source.shapes}
            with without_warning():
                dcp.save(state, storage_writer=FileSystemWriter(temporary), no_dist=True)
        else:
            for name, keys in files.items():
                save_file({key: source.whole(key) for key in keys}, temporary / name)
        for name in SMALL:
            (temporary / name).write_bytes(source.verified(name))
        (temporary / RECORD).write_text(json.dumps({"meta": asdict(source.meta), "files": files}) + "\n")
    return len(source.shapes)


def take_back(folder: Path, target: Path) -> Meta:
    """Write our checkpoint from a folder that `write_out` has written; return its metadata.

    The folder `target` appears complete or not at all. Raises Unusable if the folder is not such a folder.
    """
    meta, files = _record(folder)
    small = {name: _read(folder / name) for name in SMALL}
    try:
        with appearing(target) as temporary:
            write_whole(temporary, meta, small, _tensors(folder, files))
            Checkpoint.open(temporary)
    except (FileNotFoundError, KeyError, SafetensorError) as error:
        raise Unusable(f"{folder} lacks tensors or is damaged: {first_line(error)}", code="unreadable") from error
    return meta


def _tensors(folder: Path, files: Mapping[str, list[str]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each of our tensor files: its name and its tensors by key."""
    if not (folder / METADATA).exists():
        for name, keys in files.items():
            with safe_open(folder / name, framework="pt") as file:
                yield name, {key: file.get_tensor(key) for key in keys}
        return
    stored = DcpTensors(folder)
    for name, keys in files.items():
        yield name, {key: stored.whole(key) for key in keys}


@contextmanager
def without_warning() -> Iterator[None]:
    """Hide the warning of torch that it works in one process; `no_dist` asks for that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _record(folder: Path) -> tuple[Meta, dict[str, list[str]]]:
    """Read the metadata, and the keys of each tensor file by its name. Raises Unusable if they can't be read."""
    if not (folder / RECORD).is_file():
        raise Unusable(
            f"{folder} has no {RECORD}: name a folder that hybridtron checkpoint export has written", code="no-file"
        )
    try:
        record = json_of(_read(folder / RECORD))
        meta = Meta(**record["meta"])
        files = {str(name): [str(key) for key in keys] for name, keys in record["files"].items()}
    except (AttributeError, KeyError, NotParsed, TypeError) as error:
        raise Unusable(f"{folder / RECORD} can't be read: {first_line(error)}", code="unreadable") from error
    if wrong := [name for name in files if FILE_NAME.fullmatch(name) is None]:
        raise Unusable(f"{folder / RECORD} names the file {wrong[0]!r}, which no checkpoint has", code="malformed")
    return meta, files


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_SMALL_BYTES)
    except (OSError, Unreadable) as error:
        raise Unusable(f"{path} can't be read: {error}", code="unreadable") from error
