"""An MDS shard's layout on disk. Needs neither torch nor mosaicml-streaming.

    uint32 count, uint32 offsets[count + 1], the writer's settings as JSON, then the samples, end to end
    a sample: uint32 size of each column without a fixed size, then the columns, in the order of their names
    a column of tokens: uint8 dimensions * 4 + log2(bytes of each), the dimensions, the tokens

Our own folders have a column `tokens` with one dimension. Where not every token is learned, they have a column `mask`
too, with a byte for each token: 1 where it is learned, as a label. Every MDS reader understands a column, and code that
copies or checks a shard carries the mask along with its tokens. Bits instead of bytes would need a decoder of our own,
and compression packs bytes as well. A sample's size then follows from its length, so every offset can be checked
against lengths.npy. The tokens are a sample's last bytes, and the mask precedes them. The functions here describe
faults in words; their callers decide how to handle them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import numpy as np

from hybridtron.data.manifest import DataShard

WORD = 4  # bytes of a count, an offset or a sample's size
VERSION = 2
# the columns of our own folders
TOKENS = "tokens"
MASK = "mask"


def encoded(*columns: np.ndarray) -> bytes:
    """Encode a sample from one-dimensional columns with at least one entry each."""
    shapes = [_shape(len(column)) for column in columns]
    sizes = [len(shape) + column.nbytes for shape, column in zip(shapes, columns, strict=True)]
    values = [shape + column.tobytes() for shape, column in zip(shapes, columns, strict=True)]
    return b"".join([*(size.to_bytes(WORD, "little") for size in sizes), *values])


def _shape(count: int) -> bytes:
    """Encode the header of a one-dimensional column, which precedes its entries."""
    if count < 2**8:
        width = 0
    elif count < 2**16:
        width = 1
    else:
        width = 2
    return bytes([1 << 2 | width]) + count.to_bytes(1 << width, "little")


def mask_start(end: int, tokens: int, itemsize: int) -> int:
    """Return where a sample's mask begins, given the sample's end and its number of tokens.

    itemsize: bytes per token
    """
    return end - tokens * itemsize - len(_shape(tokens)) - tokens


def assembled(samples: list[bytes], settings: bytes) -> bytes:
    """Join encoded samples into a shard."""
    first = WORD * (len(samples) + 2) + len(settings)
    ends = first + np.cumsum([0, *map(len, samples)])
    return b"".join([np.uint32(len(samples)).tobytes(), ends.astype(np.uint32).tobytes(), settings, *samples])


def read_column(entry: dict[str, Any], name: str, data: bytes) -> Iterator[tuple[str | np.ndarray, int]]:
    """Yield a column's values in a raw shard, each with its sample's end; raise ValueError if the shard is damaged.

    The column is a `str`, or an `ndarray:DTYPE`, which is flattened. Other encodings are not decoded: some are pickles,
    which can run any program.
    """
    place = entry["column_names"].index(name)
    sizes = entry["column_sizes"]
    encoding = entry["column_encodings"][place]
    unsized = sum(not size for size in sizes)
    offsets = np.frombuffer(data, "<u4", entry["samples"] + 1, WORD).tolist()
    for first, end in itertools.pairwise(offsets):
        stored_sizes = iter(np.frombuffer(data, "<u4", unsized, first).tolist())
        widths = [size or next(stored_sizes) for size in sizes]
        begin = first + WORD * unsized + sum(widths[:place])
        value = data[begin : begin + widths[place]]
        if not first <= begin <= begin + widths[place] <= end <= len(data):
            raise ValueError(f"its sample at {first} does not lie in the shard")
        yield (value.decode() if encoding == "str" else _flat_array(encoding, value)), end


def _flat_array(encoding: str, value: bytes) -> np.ndarray:
    _, dtype, *fixed_shape = encoding.split(":")
    # A fixed shape is in the index; another shape precedes the entries.
    return np.frombuffer(value, dtype, offset=0 if fixed_shape else 1 + (value[0] >> 2) * (1 << (value[0] & 3)))


def read_offsets(data: bytes | mmap, shard: DataShard) -> np.ndarray:
    """Return the offsets of a raw shard's samples and its end; raise ValueError if the number of samples is wrong."""
    if len(data) >= WORD:
        count = int(np.frombuffer(data, np.uint32, 1)[0])
    else:
        count = 0
    if count != shard.documents:
        raise ValueError(f"holds {count} samples, and its manifest says {shard.documents}")
    if len(data) < WORD * (count + 2):
        raise ValueError(f"is too short for the offsets of {count} samples")
    return np.frombuffer(data, np.uint32, count + 1, WORD)


def wrong_samples(offsets: np.ndarray, lengths: np.ndarray, itemsize: int, size: int, masked: bool) -> np.ndarray:
    """Return indexes of samples with a size that does not fit their document's length, or a place outside the shard."""
    begins = offsets[:-1].astype(np.int64)
    ends = offsets[1:].astype(np.int64)
    tokens = lengths.astype(np.int64)
    around = WORD + 1 + np.select([tokens < 2**8, tokens < 2**16], [1, 2], 4)  # header bytes of a column
    needed = around + tokens * itemsize + masked * (around + tokens)
    fits = (ends - begins == needed) & (ends <= size)
    return np.flatnonzero(~fits | (begins < WORD * (len(tokens) + 2)))
