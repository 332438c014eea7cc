"""An MDS shard as it lies on disk, and an index held against the manifest. Neither torch nor streaming is needed.

    uint32 count, uint32 offsets[count + 1], the writer's settings as JSON, then the samples, end to end
    a sample: uint32 bytes that follow the shape, uint8 dimensions and width of the shape, the shape, the tokens

What a sample takes follows from its length, so every offset can be held against lengths.npy, and the tokens of a
sample are its last bytes. The functions here tell faults in words; what follows from one is for the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import numpy as np

from hybridtron.data.folder import DIGEST, DataManifest, DataShard, SourceSplit, safe_name

WORD = 4  # bytes of a count, an offset or a sample's size


def index_faults(index: bytes, manifest: DataManifest, of_source: SourceSplit) -> Iterator[str]:
    """Where an index.json differs from what the manifest says of the source."""
    try:
        values = json.loads(index)
        version, entries = values["version"], list(values["shards"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"does not parse: {error!r}"
        return
    if version != 2:
        yield f"has version {version!r}; 2 is known"
    if len(entries) != len(of_source.shards):
        yield f"has {len(entries)} shards, and the manifest {len(of_source.shards)}"
    for number, (entry, shard) in enumerate(zip(entries, of_source.shards, strict=False)):
        if not isinstance(entry, dict):
            yield f"has no settings for shard {number}"
            continue
        found = _told(entry)
        for key, value in _expected(manifest, shard).items():
            if found.get(key) != value:
                yield f"says of shard {number} that its {key} is {found.get(key)!r}, and the manifest {value!r}"
        if shard.packed is not None and not isinstance(found.get("packed digest"), str):
            yield f"has no {DIGEST} of shard {number} as it is stored"
        if not all(safe_name(part) for part in manifest.stored_name(shard).split("/")):
            yield f"names {manifest.stored_name(shard)!r}, which is not a name inside the folder"


def packed_digests(index: bytes) -> list[str | None]:
    """The digest of each shard's compressed form, from an index without faults."""
    entries = json.loads(index)["shards"]
    return [entry["zip_data"]["hashes"][DIGEST] if entry["zip_data"] else None for entry in entries]


def read_offsets(data: bytes | mmap, shard: DataShard) -> np.ndarray:
    """Where the samples of a raw shard begin, and where the last one ends; ValueError if it holds other samples."""
    count = int(np.frombuffer(data, np.uint32, 1)[0]) if len(data) >= WORD else 0
    if count != shard.documents:
        raise ValueError(f"holds {count} samples, and its manifest says {shard.documents}")
    if len(data) < WORD * (count + 2):
        raise ValueError(f"is too short for the offsets of {count} samples")
    return np.frombuffer(data, np.uint32, count + 1, WORD)


def wrong_samples(offsets: np.ndarray, lengths: np.ndarray, itemsize: int, size: int) -> np.ndarray:
    """The samples whose bytes do not have the size that so many tokens take, or do not lie in the shard."""
    begins, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    tokens = lengths.astype(np.int64)
    shape = np.select([tokens < 2**8, tokens < 2**16], [1, 2], 4)
    fits = (ends - begins == WORD + 1 + shape + tokens * itemsize) & (ends <= size)
    return np.flatnonzero(~fits | (begins < WORD * (len(tokens) + 2)))


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """What an index entry says, in the words of `_expected`."""
    keys = ("format", "version", "compression", "samples", "column_names", "column_encodings", "column_sizes")
    told = {key: entry.get(key) for key in keys}
    for kind, info in (("raw", entry.get("raw_data")), ("packed", entry.get("zip_data"))):
        if isinstance(info, dict):
            hashes = info.get("hashes")
            digest = hashes.get(DIGEST) if isinstance(hashes, dict) else None
            told |= {f"{kind} file": info.get("basename"), f"{kind} size": info.get("bytes"), f"{kind} digest": digest}
    return told


def _expected(manifest: DataManifest, shard: DataShard) -> dict[str, Any]:
    stored = None if shard.packed is None else manifest.stored_name(shard)
    return {
        "format": "mds",
        "version": 2,
        "compression": manifest.compression,
        "samples": shard.documents,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:{manifest.dtype}"],
        "column_sizes": [None],
        "raw file": shard.file,
        "raw size": shard.size,
        "raw digest": shard.digest,
        "packed file": stored,
        "packed size": shard.packed,
    }
