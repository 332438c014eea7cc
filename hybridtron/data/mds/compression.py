"""Compressed shards: compressing for folders that ask for it, and decompressing to the stated size, never to more.

A hundred kilobytes can decompress to gigabytes. So an algorithm runs only if it is certain to stop: by its own output
limit, or because the data states its decompressed size, which the algorithm then enforces. Our own folders use zstd
alone; the other algorithms occur in MDS folders that other programs wrote.
"""

from __future__ import annotations

import bz2
import gzip
import io
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridtron.data.manifest import DataShard
from hybridtron.regular_files import Unreadable, read_regular
from hybridtron.storage.attempts import Damaged
from hybridtron.storage.digest import digest_of

LARGEST_SHARD = 2**32  # bytes: an MDS shard stores its offsets in 32 bits
USUAL_LEVEL = 3  # level of zstd where none is named, as in mosaicml-streaming
_PACKAGES = {"zstd": "zstd", "br": "brotli", "snappy": "python-snappy"}  # names for pip
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_RLE = 1  # type of a zstd block that stores one byte and how often it repeats


def packed(compression: str, data: bytes) -> bytes:
    """Compress data by `zstd` or `zstd:LEVEL`; raise ValueError for another algorithm."""
    kind, _, level = compression.partition(":")
    if kind != "zstd":
        raise ValueError(f"shards are written as zstd or zstd:LEVEL, not as {compression}")
    return _package(kind).compress(data, int(level or USUAL_LEVEL))


def unpacked_shard(compression: str, shard: DataShard, digest: str | None, stored: Path) -> bytes:
    """Read and decompress a shard; raise Damaged if its size or digest is wrong, or if it does not decompress.

    digest: the stored file's digest; None if it is unknown

    The caller checks the digest after decompression.
    """
    try:
        data = read_regular(stored, shard.packed or 0)
        if len(data) != shard.packed:
            raise Damaged(f"has {len(data)} of {shard.packed} bytes")
        if digest not in (None, digest_of(data)):
            raise Damaged("differs from its digest in the index")
        return unpacked(compression, data, shard.size)
    except (ValueError, Unreadable) as error:
        raise Damaged(str(error)) from error


def unpacked(compression: str, data: bytes, size: int) -> bytes:
    """Decompress data to exactly `size` bytes; raise ValueError if it makes another number, or is damaged."""
    if not 0 <= size <= LARGEST_SHARD:
        raise ValueError(f"is said to have {size} bytes; a shard has at most {LARGEST_SHARD}")
    try:
        content = _made(compression.split(":")[0], data, size)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # every algorithm has its own errors
        raise ValueError(f"can't be decompressed: {error}") from error
    if len(content) != size:
        if len(content) > size:
            more = "more than "
        else:
            more = f"{len(content)} of "
        raise ValueError(f"has {more}{size} bytes when decompressed")
    return content


def _made(kind: str, data: bytes, size: int) -> bytes:
    """Decompress data, to at most one byte more than `size`. That byte reveals a wrong size."""
    if kind == "gz":
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(size + 1)
    if kind == "bz2":
        return bz2.BZ2File(io.BytesIO(data)).read(size + 1)
    if kind not in _PACKAGES:
        raise ValueError(f"is compressed by {kind!r}; gz, bz2, {', '.join(_PACKAGES)} are known")
    package = _package(kind)
    if kind == "br":
        decompressor = package.Decompressor()
        content = decompressor.process(data, output_buffer_limit=size + 1)
        if len(content) <= size and not decompressor.is_finished():
            raise ValueError("is truncated")
        return content[: size + 1]
    stated = {"zstd": _stated_by_zstd, "snappy": _stated_by_snappy}[kind](data)
    if stated != size:
        raise ValueError(f"says that it has {stated} bytes when decompressed, and its manifest {size}")
    return package.decompress(data)


def _package(kind: str) -> Any:
    name = _PACKAGES[kind]
    try:
        return import_module(name.removeprefix("python-"))
    except ImportError as error:
        raise ImportError(f"needs a package that is not installed: pip install {name}") from error


def _stated_by_zstd(data: bytes) -> int:
    """Return the decompressed size that a zstd frame's header states (RFC 8878, 3.1.1).

    Raises ValueError unless the data is exactly one complete frame.
    """
    if data[:4] != _ZSTD_MAGIC or len(data) < 6:
        raise ValueError("can't be decompressed: it does not start as zstd does")
    described = data[4]
    alone = described >> 5 & 1
    place = 5
    place += (not alone) + (0, 1, 2, 4)[described & 3]  # window descriptor and dictionary id
    width = (alone, 2, 4, 8)[described >> 6]
    if not width:
        raise ValueError("can't be decompressed: it does not say how much it makes")
    stated = int.from_bytes(data[place : place + width], "little") + 256 * (width == 2)
    place = place + width
    last = False
    while not last:
        block = int.from_bytes(data[place : place + 3], "little")
        last = bool(block & 1) or place >= len(data)
        place += 3 + (1 if block >> 1 & 3 == _RLE else block >> 3)
    if place + 4 * (described >> 2 & 1) != len(data):
        raise ValueError("can't be decompressed: it is truncated, or not one frame of zstd")
    return stated


def _stated_by_snappy(data: bytes) -> int:
    """Return the size stated at the start: seven bits a byte, with the eighth bit cleared in the last byte."""
    stated = 0
    for place, byte in enumerate(data[:5]):
        stated |= (byte & 127) << 7 * place
        if byte < 128:
            return stated
    raise ValueError("can't be decompressed: it does not say how much it makes")
