"""Our shards and those of mosaicml-streaming: the same bytes from the same documents, and each read by the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.mds.format import read_column
from hybridtron.data.mds.writer import ShardWriter, index_text
from tests.data.mosaic import MDSReader, MDSWriter
from tests.data.prepare.preparing import contents_of

LENGTHS = [1, 2, 255, 256, 3000, 70_000, 65_535, 65_536, *range(1, 120)]


def documents(dtype: str) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True) for length in LENGTHS]


def written(folder: Path, dtype: str, size_limit: int, compression: str | None, masked: bool = False) -> list[dict]:
    writer = ShardWriter(folder, dtype, size_limit, compression, masked=masked)
    for document in documents(dtype):
        writer.write(document, document % 2 if masked else None)
    writer.finish()
    writer.finish()  # nothing is left by then
    (folder / "index.json").write_bytes(index_text(writer.entries))
    return writer.entries


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7"])
@pytest.mark.parametrize(("dtype", "size_limit"), [("uint16", 2000), ("uint16", 2**26), ("uint32", 2**16)])
@pytest.mark.parametrize("masked", [False, True])
def test_shards_have_the_bytes_of_mosaicml_streaming(
    tmp_path: Path, dtype: str, size_limit: int, compression: str | None, masked: bool
) -> None:
    entries = written(tmp_path / "ours", dtype, size_limit, compression, masked)
    columns = {"tokens": f"ndarray:{dtype}"} | ({"mask": "ndarray:uint8"} if masked else {})
    settings = {"compression": compression, "hashes": ["xxh3_128"], "size_limit": size_limit}
    with MDSWriter(out=str(tmp_path / "theirs"), columns=columns, **settings) as writer:
        for document in documents(dtype):
            writer.write({"tokens": document} | ({"mask": (document % 2).astype(np.uint8)} if masked else {}))
    assert (len(entries) > 1) == (size_limit < 2**26)
    ours = contents_of(tmp_path / "ours")
    theirs = contents_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert ours == theirs


def test_both_readers_read_the_same_shards(tmp_path: Path) -> None:
    entries = written(tmp_path, "uint16", 2000, None)
    readers = [MDSReader.from_json(str(tmp_path), None, entry) for entry in entries]
    theirs = [sample["tokens"].tolist() for reader in readers for sample in reader]
    raw = [(entry, (tmp_path / entry["raw_data"]["basename"]).read_bytes()) for entry in entries]
    ours = [tokens.tolist() for entry, data in raw for tokens, _ in read_column(entry, "tokens", data)]
    assert ours == theirs == [document.tolist() for document in documents("uint16")]


def test_a_first_document_larger_than_a_shard_stands_alone(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "uint16", 1000, None)
    for length in (2000, 3):
        writer.write(np.zeros(length, np.uint16))
    writer.finish()
    assert [entry["samples"] for entry in writer.entries] == [1, 1]


SAMPLES = [{"text": "naïve ☕", "n": 3, "more": np.arange(6, dtype=np.int32).reshape(2, 3)}, {"text": "", "n": 4}]


@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray:int32:2,3"])
def test_a_column_is_read_beside_others(tmp_path: Path, encoding: str) -> None:
    """Read a column before and after others with fixed or variable sizes. One of them must not be decoded."""
    columns = {"a": "pkl", "more": encoding, "n": "int", "text": "str"}
    samples = [{"a": object, "more": np.ones((2, 3), np.int32), **sample} for sample in SAMPLES]
    with MDSWriter(out=str(tmp_path), columns=columns) as writer:
        for sample in samples:
            writer.write(sample)
    (entry,) = json.loads((tmp_path / "index.json").read_text())["shards"]
    data = (tmp_path / "shard.00000.mds").read_bytes()
    assert [text for text, _ in read_column(entry, "text", data)] == ["naïve ☕", ""]
    assert [more.tolist() for more, _ in read_column(entry, "more", data)] == [[0, 1, 2, 3, 4, 5], [1] * 6]
    assert [end for _, end in read_column(entry, "text", data)][-1] == len(data)


def test_samples_outside_the_shard_are_refused(tmp_path: Path) -> None:
    (entry,) = written(tmp_path, "uint16", 2**26, None)
    data = bytearray((tmp_path / "shard.00000.mds").read_bytes())
    first = int.from_bytes(data[4:8], "little")
    for place, value in ((4, 2**31), (8, 5), (first, 2**30)):  # an offset, the next one, and a sample's size
        damaged = bytearray(data)
        damaged[place : place + 4] = value.to_bytes(4, "little")
        with pytest.raises(ValueError, match=r"buffer|extends beyond|offset"):
            list(read_column(entry, "tokens", bytes(damaged)))
