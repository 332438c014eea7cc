"""A checkpoint's files: writes that are on disk when they return, and reads that are verified.

Tensors are stored in safetensors files, so that other programs can open them. A full tensor's entry is named by its
key; a tensor shard's entry is named `KEY@0,128`, after its offset.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from hybridtron.checkpoint.manifest import BrokenCheckpoint, File, StoredShard
from hybridtron.regular_files import open_regular
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import sync, temporary_of, writing

T = TypeVar("T")
NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_TYPE = {dtype: name for name, dtype in NAMES.items()}
_AT_ONCE = 2**20  # bytes per write: few enough to be in the CPU's cache for both the digest and the write


def write_tensors(path: Path, blocks: Sequence[Any]) -> tuple[File, list[StoredShard]]:
    """Write blocks (`ShardedTensor`s with their data) to a safetensors file and wait until it is on disk.

    Returns the manifest's entries: one for the file, and one for each block.
    """
    head = head_of((_name(block), block.dtype, block.local_shape) for block in blocks)
    chunks = []
    at = len(head)
    with writing(path) as write:
        write(memoryview(head))
        for block in blocks:
            stored = bytes_of(block.data)
            shard = StoredShard(
                block.key,
                _OF_TYPE[block.dtype],
                block.global_shape,
                block.global_offset,
                block.local_shape,
                file=path.name,
                start=at,
                digest=_digested(write, stored),
            )
            chunks.append(shard)
            at += len(stored)
    return File(at, len(head), digest_of(head)), chunks


def head_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None) -> bytes:
    """Return the head of a safetensors file for tensors that are stored one after another.

    It is padded with spaces to a multiple of 8 bytes, so that the data is aligned.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        start = end
        end = end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _OF_TYPE[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _name(block: Any) -> str:
    whole = block.local_shape == block.global_shape
    if whole:
        return block.key
    return f"{block.key}@{','.join(map(str, block.global_offset))}"


def write_bytes(path: Path, stored: bytes) -> File:
    """Write a small file, wait until it is on disk, and return its entry for the manifest."""
    with writing(path) as write:
        digest = _digested(write, memoryview(stored))
    return File(len(stored), len(stored), digest)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `target` when the block ends; remove it if the block fails.

    The block itself must flush the files that it writes. The rename is atomic, so `target` is complete or absent.
    """
    temporary = temporary_of(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(target.parent)


def in_parts(items: Iterable[T], size: Callable[[T], int], largest: int) -> list[list[T]]:
    """Split items, in order, into lists whose sizes add up to at most `largest`.

    An item larger than that gets a list for itself.
    """
    parts: list[list[T]] = []
    room = 0
    for item in items:
        if not parts or size(item) > room:
            parts.append([])
            room = largest
        parts[-1].append(item)
        room -= size(item)
    return parts


def read_head(folder: Path, name: str, file: File) -> bytes:
    """Read and verify a file's bytes before its chunks. Raises BrokenCheckpoint if they differ."""
    return _read(folder / name, 0, file.head, file.digest, file.size).tobytes()


def read_chunk(folder: Path, chunk: StoredShard, file: File) -> Tensor:
    """Read and verify a chunk, and return its entries as a tensor on the CPU. Raises BrokenCheckpoint if they differ.

    The tensor shares memory with the bytes whose digest was compared, so no copy can damage them after that.
    """
    if chunk.dtype not in NAMES:
        raise BrokenCheckpoint(f"{folder / chunk.file} has entries of type {chunk.dtype!r}, which is not known")
    dtype = NAMES[chunk.dtype]
    count = torch.Size(chunk.size).numel() * dtype.itemsize
    stored = _read(folder / chunk.file, chunk.start, count, chunk.digest, file.size)
    if count:
        return torch.from_numpy(stored).view(dtype).view(chunk.size)
    return torch.empty(chunk.size, dtype=dtype)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor's entries into another tensor.

    CPU tensors with the same dtype are copied by numpy, which is more than twice as fast as torch's own copy.
    """
    if source.device.type == target.device.type == "cpu" and source.dtype == target.dtype:
        number = _NUMBERS[source.element_size()]  # as integers, because numpy has no bf16
        np.copyto(target.detach().view(number).numpy(), source.detach().view(number).numpy())
    else:
        target.detach().copy_(source.detach())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's entries as bytes in CPU memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    entries: Any = flat.view(torch.uint8).numpy()
    return memoryview(entries)


def _digested(write: Callable[[memoryview], None], stored: memoryview) -> str:
    hashing = xxh3_128()
    for start in range(0, len(stored), _AT_ONCE):
        part = stored[start : start + _AT_ONCE]
        hashing.update(part)
        write(part)
    return hashing.hexdigest()


def _read(path: Path, start: int, count: int, expected: str, size: int) -> np.ndarray:
    """Read `count` bytes from `start` on. Raises BrokenCheckpoint if digest or file size are not as expected."""
    try:
        with open_regular(path) as file:
            actual_size = os.fstat(file.fileno()).st_size
            if actual_size != size:
                raise BrokenCheckpoint(f"{path} has {actual_size:,} bytes, was written with {size:,}")
            if not 0 <= start <= start + count <= size:
                raise BrokenCheckpoint(f"{path} ends before bytes {start:,} to {start + count:,}")
            stored = np.empty(count, dtype=np.uint8)
            file.seek(start)
            unread = stored.data
            while unread and (count_read := file.readinto(unread)):
                unread = unread[count_read:]
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} can't be read: {error}") from error
    if digest_of(stored.data) != expected:
        raise BrokenCheckpoint(f"{path} is not as it was written: bytes {start:,} to {start + count:,} differ")
    return stored
