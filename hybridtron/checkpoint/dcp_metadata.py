"""Descriptions of tensors in the file `.metadata` of torch's distributed checkpoints.

The file is a pickle. It is read as inert records (`hybridtron/inert_pickle.py`), of which only expected fields with
expected types are copied into new objects. megatron-core's `torch_dist` folders have the same format; their `.metadata`
also has the plans by which ranks wrote the tensors, which are dropped.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hybridtron.inert_pickle import Record, inert_load
from hybridtron.problems import Unusable, first_line
from hybridtron.safe_open import Unreadable, read_regular

T = TypeVar("T")
METADATA = ".metadata"
MAX_BYTES = 2**30
_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_KNOWN = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    **{str(dtype): dtype for dtype in _DTYPES},
}
_NAMES = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip
"""Module -> names that a file `.metadata` may use."""


@dataclass(frozen=True)
class ChunkPlace:
    """Place of a chunk, with the fields of torch's own class.

    relative_path: name of a file in the folder
    offset, length: bytes of the file
    transform_descriptors: names of transformations, such as compression, that the bytes need
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def read_metadata(folder: Path) -> Metadata:
    """Return a folder's metadata. Raises Unusable if it is damaged, names code, or names files in other folders."""
    path = folder / METADATA
    try:
        record = inert_load(read_regular(path, MAX_BYTES), _KNOWN, _require_description)
    except (OSError, Unreadable) as error:
        raise Unusable(f"{path} can't be read: {error}", code="unreadable") from error
    except Exception as error:  # a damaged pickle can raise any error
        raise Unusable(f"{path} is no description of tensors: {error}", code="unreadable") from error
    try:
        return _metadata(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{path} is no description of tensors: {first_line(error)}", code="malformed") from error


def _require_description(name: str) -> None:
    module, _, rest = name.rpartition(".")
    if rest not in _NAMES.get(module, ()):
        raise ValueError(f"it names {name}, which describes no tensor")


def _metadata(record: Any) -> Metadata:
    """Copy a record's descriptions into torch's classes. Raises an error for each wrong type."""
    (fields,) = _fields(record, "Metadata", "state_dict_metadata")
    (places,) = _fields(record, "Metadata", "storage_data")
    return Metadata(
        state_dict_metadata={_typed(key, str): _stored(stored) for key, stored in _typed(fields, dict).items()},
        storage_data={_index(index): _place(place) for index, place in _typed(places, dict).items()},
    )


def _stored(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, Record) and record.named == f"{_CHECKPOINT}.metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    properties, size, chunks = _fields(record, "TensorStorageMetadata", "properties", "size", "chunks")
    if not isinstance(properties, Record):
        raise TypeError(f"it has a {type(properties).__name__} in place of a tensor's properties")
    return TensorStorageMetadata(
        TensorProperties(dtype=_typed(_typed(properties.state, tuple)[0], torch.dtype)),
        _counts(size),
        [_chunk(chunk) for chunk in _typed(chunks, list)],
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    offsets, sizes = _fields(record, "ChunkStorageMetadata", "offsets", "sizes")
    return ChunkStorageMetadata(_counts(offsets), _counts(sizes))


def _index(record: Any) -> MetadataIndex:
    fields = record.state
    (key,) = _fields(record, "MetadataIndex", "fqn")
    offset = fields.get("offset")
    if offset is not None:
        offset = _counts(offset)
    return MetadataIndex(_typed(key, str), offset)


def _place(record: Any) -> ChunkPlace:
    name, offset, length = _fields(record, "_StorageInfo", "relative_path", "offset", "length")
    name = _typed(name, str)
    if name in ("", ".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"it names {name!r}, which is outside the folder")
    transforms = record.state.get("transform_descriptors") or ()
    return ChunkPlace(name, _count(offset), _count(length), tuple(_typed(transform, str) for transform in transforms))


def _fields(record: Any, kind: str, *names: str) -> Iterator[Any]:
    """Yield fields of a record of a class `kind`. Raises TypeError for another record, KeyError if it lacks a field."""
    if not isinstance(record, Record) or record.named.rpartition(".")[2] != kind:
        raise TypeError(f"it has a {type(record).__name__} in place of a {kind}")
    state = _typed(record.state, dict)
    for name in names:
        yield state[name]


def _counts(value: Any) -> torch.Size:
    return torch.Size(_count(number) for number in _typed(value, tuple))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it has a {type(value).__name__} in place of an integer from 0, or a negative integer")
    return value


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value
