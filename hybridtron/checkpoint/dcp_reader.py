"""Reading of tensors from torch's distributed checkpoints, by a description that runs no code (`dcp_metadata.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hybridtron.checkpoint.dcp_metadata import read_metadata
from hybridtron.problems import Unusable, first_line


class DcpTensors:
    """The tensors of a folder, from which parts can be read.

    shapes: shape of each tensor, by its key
    dtypes: dtype of each tensor, by its key

    Raises Unusable if the folder's metadata can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = read_metadata(folder)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.shapes = {key: tuple(stored.size) for key, stored in self._stored.items()}
        self.dtypes = {key: stored.properties.dtype for key, stored in self._stored.items()}

    def whole(self, key: str) -> Tensor:
        """Read a tensor. Raises Unusable if the folder has no such tensor, or as `part` does."""
        if key not in self.shapes:
            raise Unusable(f"{self._folder} has no tensor {key}", code="unreadable")
        shape = self.shapes[key]
        return self.part(key, (0,) * len(shape), shape)

    def part(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a rectangle of a tensor. `offset` is the rectangle's first index.

        Raises Unusable if the files are damaged, or if they do not have every element of the rectangle exactly once.
        """
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        try:
            items = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
            is_whole = _has_each_element_once(items, shape)
            into = torch.empty(tuple(shape), dtype=self.dtypes[key])
            self._reader.read_data(LoadPlan(items), _Into(into)).wait()
        except Exception as error:  # a damaged file can raise any error
            raise Unusable(f"{key} in {self._folder} can't be read: {first_line(error)}", code="unreadable") from error
        if not is_whole:
            raise Unusable(f"{self._folder} does not have every element of {key} once", code="unreadable")
        return into


def _has_each_element_once(items: Sequence[ReadItem], shape: Sequence[int]) -> bool:
    """Return True if the targets of items are disjoint and cover a rectangle.

    Equal numbers of elements do not suffice: an overlap can be as large as a hole, whose elements would be arbitrary.
    """
    if sum(math.prod(item.lengths) for item in items) != math.prod(shape):
        return False
    if len(items) == 1:
        return True
    covered = torch.zeros(tuple(shape), dtype=torch.bool)
    for item in items:
        covered[tuple(slice(first, first + n) for first, n in zip(item.dest_offsets, item.lengths, strict=True))] = True
    return bool(covered.all())


class _Into(DefaultLoadPlanner):
    """A planner that reads all items into one tensor."""

    def __init__(self, into: Tensor) -> None:
        super().__init__()
        self._tensor = into

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor
