"""A checkpoint's files: writes that return once the data is on disk, and reads that verify digests.

Tensors are stored in safetensors files, so that other programs can open them. A full tensor has its key as its name in
the file. A tensor shard is named after its key and its offset in the full tensor, such as `KEY@0,128`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from hybridtron.checkpoint.manifest import BrokenCheckpoint, File, StoredShard
from hybridtron.safe_open import open_regular
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
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAME_OF_DTYPE = {dtype: name for name, dtype in NAMES.items()}
NO_DIGEST = "0" * 32  # stands for a chunk's digest until the chunk is written
_BYTES_PER_WRITE = 2**20  # few enough to stay in the CPU's cache between digesting and writing


def write_tensors(path: Path, blocks: Sequence[Any]) -> tuple[File, list[StoredShard]]:
    """Write blocks to a safetensors file and wait until the file is on disk.

    A block is a `ShardedTensor`: a full tensor, or this process's shard of a tensor. Returns the manifest's entries: an
    entry for the file, and an entry for each block.
    """
    infos = infos_of(blocks)
    head = head_of_infos(infos)
    chunks = write_part(path, blocks, plan_chunks(path.name, blocks, len(head)), head)
    return File(len(head) + size_of(infos), len(head), digest_of(head)), chunks


class TensorInfo(NamedTuple):
    """A tensor in a file: its name in the file, its dtype's name, and its shape. Ranks can send these plain values."""

    name: str
    dtype: str
    shape: Sequence[int]


def infos_of(blocks: Iterable[Any]) -> list[TensorInfo]:
    """Return name, dtype and shape of each block."""
    return [TensorInfo(_name(block), _NAME_OF_DTYPE[block.dtype], list(block.local_shape)) for block in blocks]


def head_of_infos(infos: Iterable[TensorInfo]) -> bytes:
    """Return the head of a safetensors file with these tensors."""
    return head_of((name, NAMES[dtype], shape) for name, dtype, shape in infos)


def size_of(infos: Iterable[TensorInfo]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(math.prod(shape) * NAMES[dtype].itemsize for _, dtype, shape in infos)


def plan_chunks(file_name: str, blocks: Sequence[Any], start: int) -> list[StoredShard]:
    """Return the manifest's entries, without digests, for blocks that will lie in a file from position `start` on."""
    chunks = []
    for block in blocks:
        chunks.append(
            StoredShard(
                block.key,
                _NAME_OF_DTYPE[block.dtype],
                block.global_shape,
                block.global_offset,
                block.local_shape,
                file=file_name,
                start=start,
                digest=NO_DIGEST,
            )
        )
        start += math.prod(block.local_shape) * block.dtype.itemsize
    return chunks


def write_part(path: Path, blocks: Sequence[Any], planned: Sequence[StoredShard], head: bytes) -> list[StoredShard]:
    """Write blocks at their planned positions in a file, and wait until they are on disk. Return entries with digests.

    `head` lies directly before the first block; it is empty if another process writes the file's head. Other processes
    may write other parts of the file at the same time.
    """
    start = planned[0].start - len(head) if planned else 0
    chunks = []
    with writing(path, start) as write:
        write(memoryview(head))
        for block, chunk in zip(blocks, planned, strict=True):
            stored = bytes_of(block.data)
            size = math.prod(chunk.size) * NAMES[chunk.dtype].itemsize
            if block.key != chunk.key or len(stored) != size:  # the block could overwrite another process's
                raise BrokenCheckpoint(f"{block.key} has {len(stored)} bytes, but {chunk.key} was planned with {size}")
            chunks.append(chunk._replace(digest=_write_and_digest(write, stored)))
    return chunks


def head_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None) -> bytes:
    """Return the head of a safetensors file: the bytes before its first tensor.

    `tensors` gives name, dtype and shape of each tensor, in the file's order. Tensors are stored without gaps. The head
    is padded with spaces to a multiple of 8 bytes, so that the tensors are aligned.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        start = end
        end = end + math.prod(shape) * dtype.itemsize
        if end > start and name in header:
            raise BrokenCheckpoint(f"two tensors of a file have the name {name}")
        header[name] = {"dtype": _NAME_OF_DTYPE[dtype], "shape": shape, "data_offsets": [start, end]}
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
        digest = _write_and_digest(write, memoryview(stored))
    return File(len(stored), len(stored), digest)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a temporary folder. When the `with` body ends, rename the folder to `target`; if the body fails, remove it.

    The `with` body must flush the files that it writes. The rename is atomic: `target` is complete or absent.
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
    """Split items, in order, into lists: in each list the sizes add up to at most `largest`.

    An item that is larger than `largest` is alone in its list.
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
    """Read and verify a file's head: the bytes before its first tensor, or all bytes of a file without tensors.

    Raises BrokenCheckpoint if the digest differs.
    """
    return _read(folder / name, 0, file.head, file.digest, file.size).tobytes()


def read_chunk(folder: Path, chunk: StoredShard, file: File) -> Tensor:
    """Read and verify a chunk (a rectangle of a full tensor), and return it as a tensor on the CPU.

    The tensor uses the very memory whose digest was compared, so that no later copy can damage the data. Raises
    BrokenCheckpoint if the digest differs or the dtype is unknown.
    """
    if chunk.dtype not in NAMES:
        raise BrokenCheckpoint(
            f"{folder / chunk.file}: {chunk.key} has the dtype {chunk.dtype!r}, which this version does not know",
            code="unsupported",
        )
    dtype = NAMES[chunk.dtype]
    num_bytes = torch.Size(chunk.size).numel() * dtype.itemsize
    stored = _read(folder / chunk.file, chunk.start, num_bytes, chunk.digest, file.size)
    if num_bytes:
        return torch.from_numpy(stored).view(dtype).view(chunk.size)
    return torch.empty(chunk.size, dtype=dtype)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor into another tensor of the same shape.

    CPU tensors with the same dtype are copied by numpy, which is more than twice as fast as torch's own copy.
    """
    if source.device.type == target.device.type == "cpu" and source.dtype == target.dtype:
        integer = _INTEGER_OF_SIZE[source.element_size()]  # viewed as integers, because numpy has no bf16
        np.copyto(target.detach().view(integer).numpy(), source.detach().view(integer).numpy())
    else:
        target.detach().copy_(source.detach())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes in CPU memory. A contiguous CPU tensor is not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    entries: Any = flat.view(torch.uint8).numpy()
    return memoryview(entries)


def _write_and_digest(write: Callable[[memoryview], None], stored: memoryview) -> str:
    hashing = xxh3_128()
    for start in range(0, len(stored), _BYTES_PER_WRITE):
        part = stored[start : start + _BYTES_PER_WRITE]
        hashing.update(part)
        write(part)
    return hashing.hexdigest()


def _read(path: Path, start: int, count: int, digest: str, size: int) -> np.ndarray:
    """Read `count` bytes from position `start` on.

    Raises BrokenCheckpoint if the digest of these bytes is not `digest`, or if the file's size is not `size`.
    """
    try:
        with open_regular(path) as file:
            actual_size = os.fstat(file.fileno()).st_size
            if actual_size != size:
                raise BrokenCheckpoint(f"{path} has {actual_size:,} bytes, but was written with {size:,}")
            if not 0 <= start <= start + count <= size:
                raise BrokenCheckpoint(f"{path} has no bytes {start:,} to {start + count:,}, which the manifest lists")
            stored = np.empty(count, dtype=np.uint8)
            file.seek(start)
            unread = stored.data
            while unread and (count_read := file.readinto(unread)):
                unread = unread[count_read:]
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{path} is missing", code="no-file") from error
    except OSError as error:
        raise BrokenCheckpoint(f"{path} can't be read: {error}") from error
    if digest_of(stored.data) != digest:
        raise BrokenCheckpoint(f"{path} is damaged: bytes {start:,} to {start + count:,} differ from their digest")
    return stored
