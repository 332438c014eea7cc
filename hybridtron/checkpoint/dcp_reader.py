"""Reading of torch's distributed checkpoints without running code from them.

The file `.metadata` of such a folder is a pickle, and unpickling can call any function. The reader here unpickles only
the classes that describe tensors, and reads only files directly in the folder. megatron-core's `torch_dist` folders
have the same format; their `.metadata` also has the plans by which ranks wrote the tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hybridtron.problems import Unusable, first_line
from hybridtron.safe_open import Unreadable, read_regular

METADATA = ".metadata"
MAX_BYTES = 2**30
_CHECKPOINT = "torch.distributed.checkpoint"
_DESCRIPTIONS = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Module -> names that a file `.metadata` may use."""


class DescriptionReader(FileSystemReader):
    """A reader for `torch.distributed.checkpoint.load` whose metadata describes tensors and nothing else."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata. Raises Unusable if it names code, or files in other folders."""
        path = self.folder / METADATA
        try:
            metadata = _Descriptions(io.BytesIO(read_regular(path, MAX_BYTES))).load()
        except (OSError, Unreadable) as error:
            raise Unusable(f"{path} can't be read: {error}", code="unreadable") from error
        except Exception as error:  # a damaged pickle can raise any error
            raise Unusable(f"{path} is no description of tensors: {error}", code="unreadable") from error
        if not isinstance(metadata, Metadata):
            raise Unusable(f"{path} is no description of tensors, but a {type(metadata).__name__}", code="malformed")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise Unusable(f"{path} names {stored.relative_path!r}, which is outside the folder", code="malformed")
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        return metadata


class DcpTensors:
    """The tensors of a folder, from which parts can be read.

    shapes: shape of each tensor, by its key
    dtypes: dtype of each tensor, by its key

    Raises Unusable if the folder's metadata can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = DescriptionReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        try:
            self._stored = {
                str(key): stored
                for key, stored in metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            self.shapes = {key: tuple(map(int, stored.size)) for key, stored in self._stored.items()}
            self.dtypes = {key: stored.properties.dtype for key, stored in self._stored.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise Unusable(f"{folder / METADATA} is damaged: {first_line(error)}", code="malformed") from error

    def part(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a rectangle of a tensor. `offset` is the rectangle's first index.

        Raises Unusable if the files are damaged, or if they do not have every element of the rectangle exactly once.
        """
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        try:
            items = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
            count = sum(math.prod(item.lengths) for item in items)
            into = torch.empty(tuple(shape), dtype=self.dtypes[key])
            self._reader.read_data(LoadPlan(items), _Into(into)).wait()
        except Exception as error:  # a damaged file can raise any error
            raise Unusable(f"{key} in {self._folder} can't be read: {first_line(error)}", code="unreadable") from error
        if count != math.prod(shape):
            raise Unusable(f"{self._folder} does not have every element of {key} once", code="unreadable")
        return into


class _Into(DefaultLoadPlanner):
    """A planner that reads all items into one tensor."""

    def __init__(self, into: Tensor) -> None:
        super().__init__()
        self._tensor = into

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor


class _Descriptions(pickle.Unpickler):
    """An unpickler that knows only the classes in `_DESCRIPTIONS`."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)
