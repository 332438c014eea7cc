"""Reading of torch's distributed checkpoints without running code from them.

The file `.metadata` of such a folder is a pickle, and unpickling can call any function. The reader here unpickles only
the classes that describe tensors, and reads only files directly in the folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hybridtron.problems import Unusable
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


class _Descriptions(pickle.Unpickler):
    """An unpickler that knows only the classes in `_DESCRIPTIONS`."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)
