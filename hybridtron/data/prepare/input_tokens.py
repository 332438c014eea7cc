"""Documents from files that hold tokens: Megatron's indexed data sets, lit-gpt's packed files, and MDS shards.

The formats are read as they are documented, so the programs that made the files are not needed. This code cannot see
whether the tokens belong to the given tokenizer; `tokenized.py` checks their range.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hybridtron.data.folder import LARGEST_INDEX
from hybridtron.data.mds.compression import LARGEST_SHARD, unpacked
from hybridtron.data.mds.format import MASK, TOKENS, VERSION, read_column
from hybridtron.data.prepare.documents import (
    Document,
    Files,
    Format,
    Input,
    InputError,
    InputOptions,
    Tally,
    check_regular,
)
from hybridtron.regular_files import Unreadable, path_inside, read_regular

MDS_INDEX = "index.json"
PACKED_MAGIC = b"LITPKDS"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<QBQQ")  # version, dtype, sequences, document boundaries
PACKED_HEADER = struct.Struct("<QBQ")  # version, dtype, tokens
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # codes in both formats
CUT = (
    "packed tokens hold no boundaries but their separator: the first and the last document of a file may be cut, "
    "and count as documents of their own"
)

IGNORED_MASK = "an MDS folder has a column of masks: all of its tokens are learned here; --learn mask keeps its masks"


def megatron_files(file: Path) -> list[Files]:
    """Return a data file with its .idx; nothing if that does not exist."""
    index = file.with_suffix(".idx")
    check_regular(index)
    if index.exists():
        return [(file, index)]
    return []


def read_megatron(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield the documents, each made of its sequences in order."""
    file, index = one.files
    lengths, pointers, boundaries, dtype = _megatron_index(index)
    tokens = _mapped(file, dtype, 0)
    firsts = pointers // dtype.itemsize
    ends = pointers // dtype.itemsize + lengths
    if len(ends) and ends.max() > len(tokens):
        raise InputError(f"{file} is truncated: its index expects {ends.max()} tokens, it has {len(tokens)}")
    for number, (first, end) in enumerate(itertools.pairwise(boundaries.tolist())):
        tally.entries += 1
        sequences = [tokens[firsts[place] : ends[place]] for place in range(first, end)]
        if sequences:
            content = np.concatenate(sequences)
        else:
            content = np.empty(0, dtype)
        if tally.keeps(content):
            tally.position = int(pointers[end - 1])
            yield Document(content, reading.source, f"{file}, document {number}")


def _megatron_index(index: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype]:
    """Read an index: lengths of sequences, their starts in bytes, each document's first sequence, and the dtype."""
    data = index.read_bytes()
    start = len(INDEX_MAGIC)
    if not data.startswith(INDEX_MAGIC) or len(data) < start + INDEX_HEADER.size:
        raise InputError(f"{index} is not the index of a Megatron data set")
    version, code, sequences, documents = INDEX_HEADER.unpack_from(data, start)
    dtype = _dtype(code, index)
    start += INDEX_HEADER.size
    if version != 1 or len(data) < start + 12 * sequences + 8 * documents:
        raise InputError(f"{index} is truncated, or of version {version}; version 1 is known")
    lengths = np.frombuffer(data, "<i4", sequences, start).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, start + 4 * sequences)
    boundaries = np.frombuffer(data, "<i8", documents, start + 12 * sequences)
    if not documents or boundaries[-1] > sequences or (np.diff(boundaries) < 0).any() or (lengths < 0).any():
        raise InputError(f"{index} is damaged: the boundaries of its documents don't fit its sequences")
    return lengths, pointers, boundaries, dtype


def packed_files(file: Path) -> list[Files]:
    """Return a file that begins as packed tokens do; nothing for another file."""
    with file.open("rb") as opened:
        if opened.read(len(PACKED_MAGIC)) == PACKED_MAGIC:
            return [(file,)]
        return []


def read_packed(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield the tokens between two separators as a document.

    The separators, which also pad a file's end, are dropped.
    """
    (file,) = one.files
    with file.open("rb") as opened:
        header = opened.read(len(PACKED_MAGIC) + PACKED_HEADER.size)
    if len(header) < len(PACKED_MAGIC) + PACKED_HEADER.size:
        raise InputError(f"{file} is truncated: it has no whole header")
    _, code, count = PACKED_HEADER.unpack_from(header, len(PACKED_MAGIC))
    tokens = _mapped(file, _dtype(code, file), len(header))
    if len(tokens) < count:
        raise InputError(f"{file} is truncated: its header says {count} tokens, it has {len(tokens)}")
    boundaries = np.flatnonzero(tokens[:count] == reading.separator)
    if not len(boundaries):
        message = f"{file} has no token {reading.separator}, which parts documents"
        raise InputError(f"{message}; --separator names the one that it was packed with")
    tally.remarks.append(CUT)
    for first, end in zip([-1, *boundaries], [*boundaries, count], strict=True):
        if end > first + 1:
            tally.entries += 1
            tally.position = int(first) * tokens.itemsize
            yield Document(tokens[first + 1 : end], reading.source, f"{file}, tokens {first + 1} to {end}")


def mds_files(index: Path) -> list[Files]:
    """Return an index with each shard's file, compressed or not; raise InputError if a shard is missing."""
    shard_files: list[Files] = []
    for shard in mds_shards(index) if index.name == MDS_INDEX else ():
        names = [info["basename"] for info in (shard["raw_data"], shard["zip_data"]) if info]
        file = next((file for file in (_in_mds(index, name) for name in names) if file.exists()), None)
        if file is None:
            raise InputError(f"{index.parent} has no {' and no '.join(names)}, which its index.json names")
        shard_files.append((index, file))
    return shard_files


def mds_shards(index: Path) -> list[dict[str, Any]]:
    """Return the entries of an MDS folder's index.json; raise InputError if it is not such an index."""
    try:
        return _parsed_index(index, index.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is not the index of an MDS folder: {error!r}") from error


@lru_cache(maxsize=2)  # requested for every shard
def _parsed_index(index: Path, _: int) -> list[dict[str, Any]]:
    shards = json.loads(read_regular(index, LARGEST_INDEX))["shards"]
    if not all(isinstance(info, dict | None) for shard in shards for info in (shard["raw_data"], shard["zip_data"])):
        raise TypeError("raw_data and zip_data describe files")
    return shards


def _in_mds(index: Path, name: object) -> Path:
    if isinstance(name, str):
        file = path_inside(index.parent, name)
    else:
        file = None
    if file is None:
        raise InputError(f"{index} names {name!r}, which leads, or could lead, out of its folder: not read")
    check_regular(file)
    return file


def read_mds(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a shard's samples: their text column if there is one, else their column of tokens."""
    index, file = one.files
    entry = mds_shards(index)[one.shard]
    column = _mds_column(entry, reading.text_key, index)
    masked = MASK in entry["column_names"] and column == TOKENS
    if reading.learn is not None and not masked:
        raise InputError(f"{index} has no column {MASK!r} beside its tokens, which --learn {reading.learn} reads")
    if masked and reading.learn is None:
        tally.remarks.append(IGNORED_MASK)
    data = _mds_bytes(entry, file)
    if reading.learn:
        masks = (mask for mask, _ in _mds_values(entry, MASK, data, file))
    else:
        masks = itertools.repeat(None)
    for number, ((content, end), mask) in enumerate(zip(_mds_values(entry, column, data, file), masks, strict=False)):
        tally.entries += 1
        tally.position = end * one.size // len(data)
        if tally.keeps(content):
            yield Document(content, reading.source, f"{file}, sample {number}", _mds_mask(content, mask, file, number))


def _mds_mask(content: str | np.ndarray, mask: str | np.ndarray | None, file: Path, number: int) -> np.ndarray | None:
    if mask is None:
        return None
    if isinstance(mask, str) or len(mask) != len(content) or not np.isin(mask, (0, 1)).all():
        raise InputError(f"{file}, sample {number}: its {MASK!r} is not 0 or 1 for each of {len(content)} tokens")
    return mask != 0


def _mds_column(entry: dict[str, Any], text_key: str, index: Path) -> str:
    try:
        if (entry["format"], entry["version"]) != ("mds", VERSION):
            raise ValueError(f"{entry['format']!r} of version {entry['version']!r}; mds of version {VERSION} is known")
        encodings = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} names a shard that can't be read: {error}") from error
    if encodings.get(text_key) == "str":
        return text_key
    if str(encodings.get(TOKENS)).startswith(("ndarray:uint", "ndarray:int")):
        return TOKENS
    columns = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    raise InputError(
        f"{index} has neither a column {text_key!r} of str, nor one {TOKENS!r} of integer ndarray; it has: {columns}"
    )


def _mds_values(entry: dict[str, Any], column: str, data: bytes, file: Path) -> Iterator[tuple[str | np.ndarray, int]]:
    try:
        yield from read_column(entry, column, data)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise InputError(f"{file} is damaged: {error}") from error


def _mds_bytes(entry: dict[str, Any], file: Path) -> bytes:
    """Return a shard's bytes before compression, checked against its index; raise InputError if it is damaged."""
    raw = entry["raw_data"]
    compressed = file.name != Path(raw["basename"]).name
    info = entry["zip_data"] if compressed else raw
    try:
        data = read_regular(file, min(info["bytes"], LARGEST_SHARD))
        if not (fault := _mds_fault(data, info)) and compressed:
            data = unpacked(entry["compression"], data, raw["bytes"])
            fault = _mds_fault(data, raw) and f"decompressed it {_mds_fault(data, raw)}"
    except (ValueError, TypeError, KeyError, Unreadable) as error:
        data = b""
        fault = str(error)
    except ImportError as error:
        raise InputError(f"{file} {error}") from error
    if fault:
        raise InputError(f"{file} is damaged: it {fault}")
    return data


def _mds_fault(data: bytes, info: dict[str, Any]) -> str:
    if len(data) != info["bytes"]:
        return f"has {len(data)} bytes, {info['bytes']} by its index.json"
    differing = [kind for kind, digest in info["hashes"].items() if _hash(kind, data) != digest]
    if differing:
        return f"differs from the {differing[0]} in its index.json"
    return ""


def _hash(kind: str, data: bytes) -> str:
    """Hash data by an algorithm that an index names; raise ValueError if there is no such algorithm."""
    if kind in xxhash.algorithms_available:
        return getattr(xxhash, kind)(data).hexdigest()
    return hashlib.new(kind, data).hexdigest()


def _dtype(code: int, file: Path) -> np.dtype:
    if code not in DTYPES:
        raise InputError(f"{file} holds no integers: its dtype is number {code}")
    return np.dtype(DTYPES[code])


def _mapped(file: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    count = (file.stat().st_size - offset) // dtype.itemsize
    if not count:
        return np.empty(0, dtype)  # an empty file can't be mapped
    return np.memmap(file, dtype, mode="r", offset=offset, shape=(count,))


PACKED = Format(
    "*.bin that starts with LITPKDS: packed tokens of lit-gpt and TinyLlama", read_packed, (".bin",), files=packed_files
)
MEGATRON = Format("*.bin beside its *.idx: Megatron's indexed data set", read_megatron, (".bin",), files=megatron_files)
MDS = Format(
    "a folder with index.json: MDS shards with a column of text or of tokens",
    read_mds,
    (MDS_INDEX,),
    files=mds_files,
    learn=(MASK,),
)
