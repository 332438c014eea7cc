"""Compression and decompression of data shards, with a limit on the decompressed size.

Untrusted data of a hundred kilobytes can decompress to gigabytes. So decompression must stop at the size that the
manifest gives. Decompression of gz, bz2 and br can stop after any number of bytes. For zstd and snappy, the compressed
data states its decompressed size, and the algorithm enforces this size. So the stated size is compared with the
manifest before decompression begins.

This project compresses shards with zstd only. The other algorithms occur in MDS folders that other programs wrote.
"""

from __future__ import annotations

import bz2
import gzip
import io
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridtron.data.manifest import DataShard
from hybridtron.safe_open import Unreadable, read_regular
from hybridtron.storage.digest import digest_of
from hybridtron.storage.retry import Damaged

MAX_SHARD_BYTES = 2**32  # an MDS shard stores byte offsets in 32 bits
USUAL_LEVEL = 3  # default level of zstd, as in mosaicml-streaming
_PACKAGES = {"zstd": "zstd", "br": "brotli", "snappy": "python-snappy"}  # names for pip
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_RLE = 1  # type of a zstd block that stores one repeated byte; its header gives the repetitions, not the stored size


def compress_bytes(compression: str, data: bytes) -> bytes:
    """Compress data by `zstd` or `zstd:LEVEL`; raise ValueError for another algorithm."""
    kind, _, level = compression.partition(":")
    if kind != "zstd":
        raise ValueError(f"{compression} is not a compression for new shards; use zstd or zstd:LEVEL")
    return _package(kind).compress(data, int(level or USUAL_LEVEL))


def unpacked_shard(compression: str, shard: DataShard, digest: str | None, stored: Path) -> bytes:
    """Read and decompress a shard; raise Damaged if the file's size or digest is wrong, or if it does not decompress.

    digest: digest of the compressed file; None if the digest is unknown
    stored: path of the compressed file

    The caller compares the decompressed bytes with the digest in the manifest.
    """
    try:
        data = read_regular(stored, shard.packed or 0)
        if len(data) != shard.packed:
            raise Damaged(f"has {len(data)} of {shard.packed} bytes")
        if digest not in (None, digest_of(data)):
            raise Damaged("differs from its digest in index.json")
        return decompress_bytes(compression, data, shard.size)
    except (ValueError, Unreadable) as error:
        raise Damaged(str(error)) from error


def decompress_bytes(compression: str, data: bytes, size: int) -> bytes:
    """Decompress data to exactly `size` bytes; raise ValueError if the result has another size, or data is damaged."""
    if not 0 <= size <= MAX_SHARD_BYTES:
        raise ValueError(f"has {size} bytes when decompressed, by its manifest; a shard has at most {MAX_SHARD_BYTES}")
    try:
        content = _decompress_at_most(compression.split(":")[0], data, size)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # each package raises exceptions of its own
        raise ValueError(f"can't be decompressed: {error}") from error
    if len(content) != size:
        if len(content) > size:
            more = "more than "
        else:
            more = f"{len(content)} of "
        raise ValueError(f"has {more}{size} bytes when decompressed")
    return content


def _decompress_at_most(kind: str, data: bytes, size: int) -> bytes:
    """Decompress data to at most `size + 1` bytes. A result with `size + 1` bytes shows that `size` is wrong."""
    if kind == "gz":
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(size + 1)
    if kind == "bz2":
        return bz2.BZ2File(io.BytesIO(data)).read(size + 1)
    if kind not in _PACKAGES:
        raise ValueError(f"is compressed with {kind!r}, but only gz, bz2, {', '.join(_PACKAGES)} can be decompressed")
    package = _package(kind)
    if kind == "br":
        decompressor = package.Decompressor()
        content = decompressor.process(data, output_buffer_limit=size + 1)
        if len(content) <= size and not decompressor.is_finished():
            raise ValueError("is truncated")
        return content[: size + 1]
    stated = {"zstd": _stated_by_zstd, "snappy": _stated_by_snappy}[kind](data)
    if stated != size:
        raise ValueError(f"has {stated} bytes when decompressed, by its own header, and {size} by the manifest")
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
        raise ValueError("can't be decompressed: it does not start with a zstd header")
    # Fields of the frame header's descriptor, from the highest to the lowest bits, with their bit counts:
    #   2  width of the stated size
    #   1  single segment: there is no window descriptor
    #   2  not used here
    #   1  a checksum of 4 bytes follows the last block
    #   2  width of the dictionary id
    descriptor = data[4]
    single_segment = descriptor >> 5 & 1
    offset = 5
    offset += (not single_segment) + (0, 1, 2, 4)[descriptor & 3]  # skip the window descriptor and the dictionary id
    width = (single_segment, 2, 4, 8)[descriptor >> 6]
    if not width:
        raise ValueError("can't be decompressed: its header does not state the decompressed size")
    stated = int.from_bytes(data[offset : offset + width], "little")
    if width == 2:  # 2 bytes store the size - 256
        stated += 256
    offset += width
    last = False
    # Each block has a header of 3 bytes: 1 bit marks the last block, 2 bits give its type, 21 bits its size.
    while not last:
        block = int.from_bytes(data[offset : offset + 3], "little")
        last = bool(block & 1) or offset >= len(data)
        offset += 3 + (1 if block >> 1 & 3 == _RLE else block >> 3)
    if offset + 4 * (descriptor >> 2 & 1) != len(data):
        raise ValueError("can't be decompressed: it is truncated, or not one frame of zstd")
    return stated


def _stated_by_snappy(data: bytes) -> int:
    """Return the decompressed size that snappy data states in its first bytes.

    Each byte holds seven bits of the size, lowest bits first. The eighth bit is set in every byte but the last.
    """
    stated = 0
    for number, byte in enumerate(data[:5]):
        stated |= (byte & 127) << 7 * number
        if byte < 128:
            return stated
    raise ValueError("can't be decompressed: it does not start with its decompressed size")
