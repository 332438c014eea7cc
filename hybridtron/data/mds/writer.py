"""Writes tokenized documents as MDS shards, and builds the shards' entries for index.json.

With equal settings, this writer and MDSWriter of mosaicml-streaming write shards and entries with equal bytes, so
mosaicml-streaming can read them. A test compares the two writers. There is one exception: if the first document is
larger than the size limit of a shard, only MDSWriter writes an empty shard before this document.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hybridtron.data.manifest import DIGEST
from hybridtron.data.mds.compression import compress_bytes
from hybridtron.data.mds.format import MASK, TOKENS, VERSION, WORD, assemble_shard, encode_sample
from hybridtron.storage.digest import digest_of


class ShardWriter:
    """Writer of MDS shards.

    A new shard begins when the next document would make the uncompressed shard larger than `size_limit` bytes.

    compression: `zstd` or `zstd:LEVEL`; None to store shards uncompressed
    part: prefix of the shards' names
    masked: whether `write` gets a loss mask for each document
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        size_limit: int,
        compression: str | None,
        part: str = "",
        masked: bool = False,
    ) -> None:
        (folder / part).mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.compression = compression
        self.part = part
        self.entries: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.learned: list[int] | None = [] if masked else None  # number of learned tokens of each document
        encodings = {**({MASK: "ndarray:uint8"} if masked else {}), TOKENS: f"ndarray:{dtype}"}
        self._settings = {
            "version": VERSION,
            "format": "mds",
            "compression": compression,
            "hashes": [DIGEST],
            "size_limit": size_limit,
            "column_names": list(encodings),
            "column_encodings": list(encodings.values()),
            "column_sizes": [None] * len(encodings),
        }
        self._settings_text = json.dumps(self._settings, sort_keys=True).encode()
        self._room = size_limit - 2 * WORD - len(self._settings_text)  # bytes for samples and the samples' offsets
        self._samples: list[bytes] = []
        self._taken = 0

    def write(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Add a document.

        tokens: array with the writer's dtype
        mask: True or 1 for each token that counts in the loss as a label; None if the writer is not `masked`
        """
        assert (mask is None) == (self.learned is None)
        if mask is None or self.learned is None:
            sample = encode_sample(tokens)
        else:
            sample = encode_sample(mask.astype(np.uint8), tokens)
            self.learned.append(int(mask.sum()))
        if self._taken + len(sample) + WORD > self._room:
            self.finish()
        self._samples.append(sample)
        self.lengths.append(len(tokens))
        self._taken += len(sample) + WORD

    def finish(self) -> None:
        """Write the current shard to its file, if the shard has documents."""
        if not self._samples:
            return
        name = f"{self.part}shard.{len(self.entries):05}.mds"
        stored = assemble_shard(self._samples, self._settings_text)
        entry = {**self._settings, "samples": len(self._samples), "raw_data": _described(name, stored)}
        if self.compression is not None:
            name = f"{name}.{self.compression.partition(':')[0]}"
            stored = compress_bytes(self.compression, stored)
        if self.compression is not None:
            entry["zip_data"] = _described(name, stored)
        else:
            entry["zip_data"] = None
        (self.folder / name).write_bytes(stored)
        self.entries.append(entry)
        self._samples = []
        self._taken = 0


def index_text(entries: list[dict[str, Any]]) -> bytes:
    """Return the contents of index.json for these shards' entries."""
    return json.dumps({"version": VERSION, "shards": entries}, sort_keys=True).encode()


def _described(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {DIGEST: digest_of(data)}}
