"""Documents from files with token ids: Megatron's indexed data sets, lit-gpt's packed files, and MDS shards.

MDS shards may also hold text. The formats are decoded here, so the packages that wrote the files are not needed. The
files do not say which tokenizer made the token ids. `tokenized.py` checks only that the ids are in the vocabulary.
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

from hybridtron.data.folder import MAX_INDEX_BYTES
from hybridtron.data.mds.compression import MAX_SHARD_BYTES, decompress_bytes
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
from hybridtron.safe_open import Unreadable, path_inside, read_regular

MDS_INDEX = "index.json"
PACKED_MAGIC = b"LITPKDS"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<QBQQ")  # version, dtype code, number of sequences, number of document boundaries
PACKED_HEADER = struct.Struct("<QBQ")  # version, dtype code, number of tokens
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # code -> dtype, in both formats
CUT = (
    "a packed file marks documents only by a separator, so its first and its last document may be parts of longer "
    "documents; each part counts as a document"
)

IGNORED_MASK = (
    "an MDS folder has loss masks, which are ignored: all of its tokens are learned; set --learn mask to use them"
)


def megatron_files(file: Path) -> list[Files]:
    """Return a data file with its index (.idx); an empty list if the index does not exist."""
    index = file.with_suffix(".idx")
    check_regular(index)
    if index.exists():
        return [(file, index)]
    return []


def read_megatron(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield the documents in a Megatron data set. A document is the concatenation of its sequences."""
    file, index = entry.files
    lengths, pointers, boundaries, dtype = _megatron_index(index)
    tokens = _mapped(file, dtype, 0)
    firsts = pointers // dtype.itemsize
    ends = pointers // dtype.itemsize + lengths
    if len(ends) and ends.max() > len(tokens):
        raise InputError(
            f"{file} is truncated: it has {len(tokens)} tokens, but its index expects {ends.max()}", code="unreadable"
        )
    for number, (first, end) in enumerate(itertools.pairwise(boundaries.tolist())):
        tally.entries += 1
        sequences = [tokens[firsts[number] : ends[number]] for number in range(first, end)]
        if sequences:
            content = np.concatenate(sequences)
        else:
            content = np.empty(0, dtype)
        if tally.accept(content):
            tally.position = int(pointers[end - 1])
            yield Document(content, reading.source, f"{file}, document {number}")


def _megatron_index(index: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype]:
    """Return an index file's contents: (lengths, pointers, boundaries, dtype).

    lengths: how many tokens each sequence has
    pointers: each sequence's byte offset in the data file
    boundaries: index of each document's first sequence; the last entry is the number of sequences
    """
    data = index.read_bytes()
    start = len(INDEX_MAGIC)
    if not data.startswith(INDEX_MAGIC) or len(data) < start + INDEX_HEADER.size:
        raise InputError(f"{index} is not the index of a Megatron data set", code="unreadable")
    version, code, sequences, documents = INDEX_HEADER.unpack_from(data, start)
    dtype = _dtype(code, index)
    start += INDEX_HEADER.size
    if version != 1 or len(data) < start + 12 * sequences + 8 * documents:
        raise InputError(
            f"{index} is truncated, or has version {version}; only version 1 can be read", code="unreadable"
        )
    lengths = np.frombuffer(data, "<i4", sequences, start).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, start + 4 * sequences)
    boundaries = np.frombuffer(data, "<i8", documents, start + 12 * sequences)
    if not documents or boundaries[-1] > sequences or (np.diff(boundaries) < 0).any() or (lengths < 0).any():
        raise InputError(
            f"{index} is damaged: the boundaries of its documents don't fit its sequences", code="unreadable"
        )
    return lengths, pointers, boundaries, dtype


def packed_files(file: Path) -> list[Files]:
    """Return a file that begins with lit-gpt's magic bytes; an empty list for any other file."""
    with file.open("rb") as opened:
        if opened.read(len(PACKED_MAGIC)) == PACKED_MAGIC:
            return [(file,)]
        return []


def read_packed(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Split the tokens at the separators, and yield each part that is not empty as a document.

    Separators also pad the end of a file, so several may follow each other.
    """
    (file,) = entry.files
    with file.open("rb") as opened:
        header = opened.read(len(PACKED_MAGIC) + PACKED_HEADER.size)
    if len(header) < len(PACKED_MAGIC) + PACKED_HEADER.size:
        raise InputError(f"{file} is truncated: its header is incomplete", code="unreadable")
    _, code, count = PACKED_HEADER.unpack_from(header, len(PACKED_MAGIC))
    tokens = _mapped(file, _dtype(code, file), len(header))
    if len(tokens) < count:
        raise InputError(
            f"{file} is truncated: it has {len(tokens)} tokens, but its header says {count} tokens", code="unreadable"
        )
    boundaries = np.flatnonzero(tokens[:count] == reading.separator)
    if not len(boundaries):
        message = f"{file} does not contain token {reading.separator}, which should separate documents"
        raise InputError(f"{message}; set --separator to the separator in this file", code="mismatch")
    tally.remarks.append(CUT)
    for first, end in zip([-1, *boundaries], [*boundaries, count], strict=True):
        if end > first + 1:
            tally.entries += 1
            tally.position = int(first) * tokens.itemsize
            yield Document(tokens[first + 1 : end], reading.source, f"{file}, tokens {first + 1} to {end}")


def mds_files(index: Path) -> list[Files]:
    """Return (index.json, shard's file) for each shard; raise InputError if a shard is missing.

    A shard's file is the uncompressed file if it exists, else the compressed file.
    """
    shard_files: list[Files] = []
    for shard in mds_shards(index) if index.name == MDS_INDEX else ():
        names = [info["basename"] for info in (shard["raw_data"], shard["zip_data"]) if info]
        file = next((file for file in (_in_mds(index, name) for name in names) if file.exists()), None)
        if file is None:
            raise InputError(
                f"{index.parent} has no {' and no '.join(names)}, although its index.json names it", code="no-file"
            )
        shard_files.append((index, file))
    return shard_files


def mds_shards(index: Path) -> list[dict[str, Any]]:
    """Return the entries in an MDS folder's index.json; raise InputError if the file is not an MDS index."""
    try:
        return _parsed_index(index, index.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is not the index of an MDS folder: {error!r}", code="unreadable") from error


# The parsed index is cached, because `mds_shards` is called for every shard. The mtime is an argument, so that a
# changed file is read again.
@lru_cache(maxsize=2)
def _parsed_index(index: Path, _: int) -> list[dict[str, Any]]:
    shards = json.loads(read_regular(index, MAX_INDEX_BYTES))["shards"]
    if not all(isinstance(info, dict | None) for shard in shards for info in (shard["raw_data"], shard["zip_data"])):
        raise TypeError("raw_data or zip_data is not an object")
    return shards


def _in_mds(index: Path, name: object) -> Path:
    if isinstance(name, str):
        file = path_inside(index.parent, name)
    else:
        file = None
    if file is None:
        raise InputError(
            f"{index} names {name!r}, which is not read because it may lead out of the folder", code="misplaced"
        )
    check_regular(file)
    return file


def read_mds(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a shard's samples as documents, from the text column if there is one, else from the column `tokens`."""
    index, file = entry.files
    shard = mds_shards(index)[entry.shard]
    column = _mds_column(shard, reading.text_key, index)
    masked = MASK in shard["column_names"] and column == TOKENS
    if reading.learn is not None and column != TOKENS:
        raise InputError(
            f"{index}: documents are read from the text column {column!r}, but --learn {reading.learn} needs the "
            f"columns {TOKENS!r} and {MASK!r}",
            code="missing",
        )
    if reading.learn is not None and not masked:
        raise InputError(f"{index} has no column {MASK!r}, which --learn {reading.learn} needs", code="missing")
    if masked and reading.learn is None:
        tally.remarks.append(IGNORED_MASK)
    data = _mds_bytes(shard, file)
    if reading.learn:
        masks = (mask for mask, _ in _mds_values(shard, MASK, data, file))
    else:
        masks = itertools.repeat(None)
    for number, ((content, end), mask) in enumerate(zip(_mds_values(shard, column, data, file), masks, strict=False)):
        tally.entries += 1
        tally.position = end * entry.size // len(data)
        if tally.accept(content):
            yield Document(content, reading.source, f"{file}, sample {number}", _mds_mask(content, mask, file, number))


def _mds_mask(content: str | np.ndarray, mask: str | np.ndarray | None, file: Path, number: int) -> np.ndarray | None:
    if mask is None:
        return None
    if isinstance(mask, str) or len(mask) != len(content) or not np.isin(mask, (0, 1)).all():
        raise InputError(
            f"{file}, sample {number}: the column {MASK!r} must have a 0 or 1 for each of {len(content)} tokens",
            code="malformed",
        )
    return mask != 0


def _mds_column(entry: dict[str, Any], text_key: str, index: Path) -> str:
    try:
        if (entry["format"], entry["version"]) != ("mds", VERSION):
            raise ValueError(
                f"its format is {entry['format']!r} {entry['version']!r}, but only 'mds' {VERSION} can be read"
            )
        encodings = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} names a shard that can't be read: {error}", code="unreadable") from error
    if encodings.get(text_key) == "str":
        return text_key
    if str(encodings.get(TOKENS)).startswith(("ndarray:uint", "ndarray:int")):
        return TOKENS
    columns = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    raise InputError(
        f"{index} has neither a column {text_key!r} of strings nor a column {TOKENS!r} of integers; it has {columns}",
        code="missing",
    )


def _mds_values(entry: dict[str, Any], column: str, data: bytes, file: Path) -> Iterator[tuple[str | np.ndarray, int]]:
    try:
        yield from read_column(entry, column, data)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise InputError(f"{file} is damaged: {error}", code="unreadable") from error


def _mds_bytes(entry: dict[str, Any], file: Path) -> bytes:
    """Return a shard's decompressed bytes; raise InputError if a size or digest differs from the index."""
    raw = entry["raw_data"]
    compressed = file.name != Path(raw["basename"]).name
    info = entry["zip_data"] if compressed else raw
    try:
        data = read_regular(file, min(info["bytes"], MAX_SHARD_BYTES))
        if not (fault := _mds_fault(data, info)) and compressed:
            data = decompress_bytes(entry["compression"], data, raw["bytes"])
            fault = _mds_fault(data, raw) and f"{_mds_fault(data, raw)} (decompressed)"
    except (ValueError, TypeError, KeyError, Unreadable) as error:
        data = b""
        fault = str(error)
    except ImportError as error:
        raise InputError(f"{file} {error}", code="not-installed") from error
    if fault:
        raise InputError(f"{file} is damaged: it {fault}", code="unreadable")
    return data


def _mds_fault(data: bytes, info: dict[str, Any]) -> str:
    if len(data) != info["bytes"]:
        return f"has {len(data)} bytes, but index.json says {info['bytes']}"
    differing = [kind for kind, digest in info["hashes"].items() if _hash(kind, data) != digest]
    if differing:
        return f"differs from its {differing[0]} digest in index.json"
    return ""


def _hash(kind: str, data: bytes) -> str:
    """Return the digest of data by the algorithm `kind`; raise ValueError if there is no such algorithm."""
    if kind in xxhash.algorithms_available:
        return getattr(xxhash, kind)(data).hexdigest()
    return hashlib.new(kind, data).hexdigest()


def _dtype(code: int, file: Path) -> np.dtype:
    if code not in DTYPES:
        raise InputError(f"{file} has the dtype code {code}, which is not an integer dtype", code="wrong-type")
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
