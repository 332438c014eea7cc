"""Folders of torch's distributed checkpoints with damaged or hostile descriptions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from hybridtron.checkpoint.dcp_metadata import METADATA, read_metadata
from hybridtron.checkpoint.dcp_reader import DcpTensors
from hybridtron.checkpoint.exchange import without_warning
from hybridtron.problems import Unusable
from tests.pickles import state_of_a_class

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.tensor(7, dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with without_warning():
        dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def change(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Change a folder's metadata in place, or replace it with the value that `edit` returns."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    (folder / METADATA).write_bytes(pickle.dumps(edit(metadata) or metadata))


def place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def test_whole_tensors_and_parts_are_read(folder: Path) -> None:
    stored = DcpTensors(folder)
    assert all(torch.equal(stored.whole(key), tensor) for key, tensor in TENSORS.items())
    assert torch.equal(stored.part("a", (1, 1), (2, 2)), TENSORS["a"][1:3, 1:])
    with pytest.raises(Unusable, match="no tensor c"):
        stored.whole("c")


def test_no_class_of_the_process_gets_an_attribute(folder: Path) -> None:
    """With `name` set for all paths, a check of a path's name would let files outside the folder pass."""
    (folder / METADATA).write_bytes(state_of_a_class("pathlib.PosixPath", "name", "../x"))
    with pytest.raises(Unusable) as refused:
        read_metadata(folder)
    assert refused.value.code == "unreadable"
    assert Path("../x").name == "x"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", 3, None, Path("x")])
def test_names_of_other_folders_are_refused(name: Any, folder: Path) -> None:
    change(folder, lambda metadata: setattr(place(metadata), "relative_path", name))
    with pytest.raises(Unusable) as refused:
        read_metadata(folder)
    assert refused.value.code == "malformed"


@pytest.mark.parametrize(
    "edit",
    [
        lambda _: Metadata({}),
        lambda _: {"state_dict_metadata": {}},
        lambda metadata: setattr(metadata, "storage_data", {"a": 3}),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "properties", torch.float32),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "chunks", None),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", torch.Size([-4, 3])),
        lambda metadata: setattr(place(metadata), "offset", "0"),
    ],
)
def test_damaged_descriptions_are_refused(edit: Callable[[Any], Any], folder: Path) -> None:
    change(folder, edit)
    with pytest.raises(Unusable) as refused:
        DcpTensors(folder)
    assert refused.value.code == "malformed"


def test_fields_without_use_may_have_any_type(folder: Path) -> None:
    change(folder, lambda metadata: setattr(metadata, "storage_meta", 3))
    assert torch.equal(DcpTensors(folder).whole("a"), TENSORS["a"])


def test_overlapping_chunks_with_a_hole_are_refused(folder: Path) -> None:
    """Two equal chunks have as many elements as the tensor; half of the tensor would be arbitrary."""

    def halve(metadata: Metadata, second: int) -> None:
        stored = metadata.state_dict_metadata["a"]
        starts = (0, second)
        stored.chunks = [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([2, 3])) for first in starts]
        whole = next(place for index, place in metadata.storage_data.items() if index.fqn == "a")
        metadata.storage_data |= {MetadataIndex("a", torch.Size([first, 0])): whole for first in starts}

    change(folder, lambda metadata: halve(metadata, 2))
    assert DcpTensors(folder).whole("a").shape == (4, 3)
    change(folder, lambda metadata: halve(metadata, 0))
    with pytest.raises(Unusable, match="every element of a once"):
        DcpTensors(folder).whole("a")
