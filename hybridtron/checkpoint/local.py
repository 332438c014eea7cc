"""Folders of node-local checkpoints, and how ranks read them. `local_save.py` writes, `local_restore.py` picks one.

    LOCAL_DIR/NAME-ID/HOST/step-00000120/part-00003/    the part of node 3: files as in a checkpoint, with a manifest
    LOCAL_DIR/NAME-ID/HOST/step-00000120/part-00002/    a copy of the part of the node before it

HOST is the node's name, so nodes that share a folder by mistake do not overwrite each other's files. ID is stored in
`RUN/checkpoints/local` (`local_identity.py`): if that file is gone, the run's local checkpoints can't be found.

A rectangle is a block of a tensor. The part of a node has every rectangle that the node's ranks hold, once. So its
ranks read nothing from other nodes. In return, a run can resume from a local checkpoint only with the same layout and
the same ranks on each node.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import copy, read_chunk
from hybridtron.checkpoint.folder import step_folders, step_of
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.config.schema import Config
from hybridtron.nested import json_of
from hybridtron.parallel.control import node_name

RECORD = "local.json"


@dataclass(frozen=True)
class NodePartRecord:
    """Description of a part, in its file `local.json`.

    save: random text that all parts of one save have in common
    part: index of the node that wrote the part
    nodes: the global ranks of each node
    layout: the parallel layout, as text
    limits: how many limits the run's `Identity` had when the part was written
    """

    save: str
    part: int
    nodes: Sequence[Sequence[int]]
    layout: str
    limits: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_values(cls, values: Any) -> Self:
        """Build a record from the values of its JSON. Raises ValueError for other keys or other types of values."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            raise ValueError(f"its keys are not {', '.join(names)}")
        record = cls(**values)
        texts = (record.save, record.layout)
        numbers = (record.part, record.limits)
        if not all(isinstance(text, str) for text in texts) or not all(map(_is_count, numbers)):
            raise ValueError("save and layout must be texts, part and limits numbers from 0")
        if not _is_list_of(record.nodes, lambda ranks: _is_list_of(ranks, _is_count)):
            raise ValueError("nodes must be lists of ranks")
        if record.part >= len(record.nodes):
            raise ValueError(f"it is part {record.part} of {len(record.nodes)} nodes")
        return record


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list_of(values: Any, is_element: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(map(is_element, values))


class LocalCheckpoint(Checkpoint):
    """The part of a local checkpoint that the ranks of a node read.

    A rank asks for the rectangles that it held when the checkpoint was written, and gets these alone. Rectangles of
    other ranks may overlap them, because replicas may be cut differently.
    """

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a part, and verify its manifest, config.yaml and record. Raises BrokenCheckpoint if one is damaged."""
        checkpoint = cls(folder, manifest.read(folder))
        checkpoint.verified("config.yaml")
        checkpoint.verified(RECORD)
        return checkpoint

    @cached_property
    def record(self) -> NodePartRecord:
        """The part's description. Raises BrokenCheckpoint if it is damaged."""
        try:
            return NodePartRecord.of_values(json_of(self.verified(RECORD)))
        except ValueError as error:  # also NotParsed
            why = f"{self.folder / RECORD} is damaged, or another version wrote it: {error}"
            raise BrokenCheckpoint(why) from error

    def fault(self, index: int, count: int) -> str | None:
        """Read and verify every `count`-th file and chunk from number `index` on; return a fault, or None."""
        try:
            for name in list(self.manifest.files)[index::count]:
                self.verified(name)
            for chunk in self.manifest.chunks[index::count]:
                self._verify(chunk)
        except BrokenCheckpoint as error:
            return str(error)
        return None

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        by_place = {(chunk.offset, chunk.size): chunk for chunk in self._of(key)}
        for target, offset in wanted:
            chunk = by_place.get((tuple(offset), tuple(target.shape)))
            if chunk is None:
                raise BrokenCheckpoint(
                    f"{self.folder} has no part of {key} with the offset {tuple(offset)} and the shape "
                    f"{tuple(target.shape)}: it was written under another layout",
                    code="mismatch",
                )
            copy(read_chunk(self.folder, chunk, self.manifest.files[chunk.file]), target)


def folder_of_node(config: Config, identity: str) -> Path:
    """Return this node's folder for the run's local checkpoints."""
    assert config.checkpoint.local_dir is not None
    name = Path(config.run.dir).absolute().name
    return Path(config.checkpoint.local_dir) / f"{name}-{identity}" / node_name()


def part_name(part: int) -> str:
    return f"part-{part:05}"


def keep_newest(folder: Path, count: int) -> None:
    """Remove all local checkpoints of a node but the newest `count`."""
    for old in step_folders(folder)[:-count]:
        remove(old)


def drop_after(folder: Path, step: int) -> None:
    """Remove a node's local checkpoints of steps after `step`, at which training continues."""
    for path in step_folders(folder):
        if step_of(path) > step:
            remove(path)
    remove_temporaries(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove the leftovers of failed or killed saves and removals."""
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a local checkpoint. It is renamed first, so that no incomplete folder keeps its name."""
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
