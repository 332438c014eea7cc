"""The binary format of an MDS shard. Needs neither torch nor mosaicml-streaming.

    a shard:   uint32 sample count, uint32 offsets[sample count + 1], the writer's settings as JSON, and the contiguous
               samples; offsets count bytes from the shard's start, and the last is the shard's end
    a sample:  uint32 byte size for each column without a fixed size, then the columns, in alphabetical order
    a column with an array:  uint8 header (4 * dimension count + log2(bytes per dimension)), the dimensions, the array's
                             elements

The folders that this project writes have one sample for each document. The sample has a one-dimensional column
`tokens`. If the folder has loss masks, the sample also has a column `mask`, with one byte for each token: 1 if the
token counts in the loss as a label, otherwise 0. Masks are a column because every MDS reader understands columns. They
are not packed into bits, because bits would need their own decoder, and compression makes such bytes small.

A sample's size follows from its token count, so every offset can be checked against lengths.npy. The tokens are the
last bytes in a sample, and the mask precedes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import numpy as np

from hybridtron.data.manifest import DataShard

WORD = 4  # bytes of a uint32
VERSION = 2  # version of the MDS format
# names of the columns in folders that this project writes
TOKENS = "tokens"
MASK = "mask"


def encode_sample(*columns: np.ndarray) -> bytes:
    """Encode a sample from one-dimensional arrays, which must not be empty."""
    shapes = [_shape(len(column)) for column in columns]
    sizes = [len(shape) + column.nbytes for shape, column in zip(shapes, columns, strict=True)]
    values = [shape + column.tobytes() for shape, column in zip(shapes, columns, strict=True)]
    return b"".join([*(size.to_bytes(WORD, "little") for size in sizes), *values])


def _shape(count: int) -> bytes:
    """Encode the header and the dimension of a one-dimensional column with `count` elements."""
    if count < 2**8:
        width = 0
    elif count < 2**16:
        width = 1
    else:
        width = 2
    return bytes([1 << 2 | width]) + count.to_bytes(1 << width, "little")


def mask_start(end: int, tokens: int, itemsize: int) -> int:
    """Return the offset in the shard at which the elements of a sample's mask begin.

    end: offset at which the sample ends
    tokens: how many tokens the sample has
    itemsize: bytes per token
    """
    return end - tokens * itemsize - len(_shape(tokens)) - tokens


def assemble_shard(samples: list[bytes], settings: bytes) -> bytes:
    """Assemble a shard's bytes from encoded samples and the writer's settings as JSON."""
    first = WORD * (len(samples) + 2) + len(settings)
    ends = first + np.cumsum([0, *map(len, samples)])
    return b"".join([np.uint32(len(samples)).tobytes(), ends.astype(np.uint32).tobytes(), settings, *samples])


def read_column(entry: dict[str, Any], name: str, data: bytes) -> Iterator[tuple[str | np.ndarray, int]]:
    """Yield a column's value, and the offset at which the sample ends, for each sample in a shard.

    entry: the shard's entry in index.json
    name: the column's name. Its encoding must be `str` or `ndarray`; arrays are yielded flattened.
    data: the decompressed shard

    Raises ValueError if the shard is damaged. Callers must refuse columns with other encodings: some are
    pickles, which can run any program.
    """
    number = entry["column_names"].index(name)
    sizes = entry["column_sizes"]
    encoding = entry["column_encodings"][number]
    unsized = sum(not size for size in sizes)
    offsets = np.frombuffer(data, "<u4", entry["samples"] + 1, WORD).tolist()
    for first, end in itertools.pairwise(offsets):
        stored_sizes = iter(np.frombuffer(data, "<u4", unsized, first).tolist())
        widths = [size or next(stored_sizes) for size in sizes]
        begin = first + WORD * unsized + sum(widths[:number])
        value = data[begin : begin + widths[number]]
        if not first <= begin <= begin + widths[number] <= end <= len(data):
            raise ValueError(f"its sample at byte {first} extends beyond the sample's or the shard's end")
        yield (value.decode() if encoding == "str" else _flat_array(encoding, value)), end


def _flat_array(encoding: str, value: bytes) -> np.ndarray:
    _, dtype, *fixed_shape = encoding.split(":")
    # A fixed shape is part of the encoding in index.json. Otherwise a header and the dimensions precede the elements.
    return np.frombuffer(value, dtype, offset=0 if fixed_shape else 1 + (value[0] >> 2) * (1 << (value[0] & 3)))


def read_offsets(data: bytes | mmap, shard: DataShard) -> np.ndarray:
    """Return the offsets in a decompressed shard; raise ValueError if its sample count differs from the manifest.

    The samples begin at these offsets, and the shard ends at the last.
    """
    if len(data) >= WORD:
        count = int(np.frombuffer(data, np.uint32, 1)[0])
    else:
        count = 0
    if count != shard.documents:
        raise ValueError(f"holds {count} samples, but the manifest says {shard.documents}")
    if len(data) < WORD * (count + 2):
        raise ValueError(f"is too short for the offsets of {count} samples")
    return np.frombuffer(data, np.uint32, count + 1, WORD)


def wrong_samples(offsets: np.ndarray, lengths: np.ndarray, itemsize: int, size: int, masked: bool) -> np.ndarray:
    """Return the indices of samples with a wrong size, or outside the shard.

    offsets: byte offsets at which the samples begin, and at which the shard ends
    lengths: number of tokens in each sample, from which the sample's right size follows
    itemsize: bytes per token
    size: the shard's size in bytes
    masked: whether samples have a column `mask`
    """
    begins = offsets[:-1].astype(np.int64)
    ends = offsets[1:].astype(np.int64)
    tokens = lengths.astype(np.int64)
    # bytes of a column in addition to its elements: its size, its header byte, and its dimension
    overhead = WORD + 1 + np.select([tokens < 2**8, tokens < 2**16], [1, 2], 4)
    needed = overhead + tokens * itemsize + masked * (overhead + tokens)
    fits = (ends - begins == needed) & (ends <= size)
    return np.flatnonzero(~fits | (begins < WORD * (len(tokens) + 2)))
