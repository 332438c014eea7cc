"""Formats that hold tokens, from files made by the format's own tools or by its description."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridtron.data.prepare.documents import InputError, InputOptions, Tally
from hybridtron.data.prepare.formats import read
from hybridtron.data.prepare.input_files import find
from tests.data.mosaic import MDSWriter
from tests.data.prepare.preparing import TEXTS, contents, read_all

TOKENS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [300, 301]]


def test_megatron(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for vocab, name in ((400, "small"), (70_000, "large")):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.uint16 if vocab < 65_500 else np.int32)
        for document in ([TOKENS[0]], TOKENS[1:3], [[]], [TOKENS[3]]):
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(str(tmp_path / f"{name}.idx"))
    expected = [TOKENS[0], TOKENS[1] + TOKENS[2], TOKENS[3]]
    assert len(find([str(tmp_path / "*")]).inputs) == 2
    assert contents(read_all(tmp_path)) == expected * 2
    assert contents(read_all(tmp_path / "large.idx")) == expected
    for name, cut, message in (("small.bin", 2, "truncated: its index expects 11"), ("large.idx", 9, "is truncated")):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-cut])
        with pytest.raises(InputError, match=message):
            read_all(tmp_path / name)
    (tmp_path / "small.idx").write_bytes(b"something else")
    with pytest.raises(InputError, match="is not the index of a Megatron data set"):
        read_all(tmp_path / "small.bin")


def packed(tokens: list[int], code: int = 8, dtype: str = "<u2") -> bytes:
    return b"LITPKDS" + struct.pack("<QBQ", 1, code, len(tokens)) + np.array(tokens, dtype).tobytes()


def test_packed_tokens(tmp_path: Path) -> None:
    file = tmp_path / "train_0000.bin"
    reading = InputOptions(separator=1)
    for code, dtype in ((8, "<u2"), (4, "<i4")):
        file.write_bytes(packed([7, 7, 1, *TOKENS[0], 1, 1, *TOKENS[3], 1, 1, 1], code, dtype))
        assert contents(read_all(file, reading=reading)) == [[7, 7], TOKENS[0], TOKENS[3]]
    tally = Tally("a", "documents", 0)
    list(read(find([str(file)]).inputs[0], reading, tally))
    assert "may be cut" in tally.remarks[0]
    with pytest.raises(InputError, match=r"no token 2.* --separator"):
        read_all(file, reading=InputOptions(separator=2))
    file.write_bytes(packed([1, 2, 3])[:-2])
    with pytest.raises(InputError, match=r"truncated: .*3 tokens.* 2"):
        read_all(file, reading=reading)
    file.write_bytes(packed([1, 2, 3], 6, "<f4"))
    with pytest.raises(InputError, match="holds no integers"):
        read_all(file, reading=reading)


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict], compression: str | None = None) -> Path:
    with MDSWriter(
        out=str(folder), columns=columns, compression=compression, hashes=["sha1", "xxh64"], size_limit=500
    ) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_mds(compression: str | None, tmp_path: Path) -> None:
    samples = [{"text": text, "n": 1} for text in TEXTS]
    write_mds(tmp_path / "text", {"text": "str", "n": "int"}, samples, compression)
    for name, dtype in (("a", "uint16"), ("b", "int64")):
        arrays = [{"tokens": np.array(tokens, dtype)} for tokens in TOKENS]
        write_mds(tmp_path / name, {"tokens": f"ndarray:{dtype}"}, arrays, compression)
    found = find([str(tmp_path / "text")])
    assert len(found.inputs) > 1
    assert contents(read_all(tmp_path / "text/index.json")) == TEXTS
    assert contents(read_all(tmp_path)) == TOKENS + TOKENS + TEXTS
    shard = found.inputs[0].files[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"sha1 .*index\.json"):
        read_all(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"has \d+ bytes, \d+ by its index.json"):
        read_all(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=r"text has no shard\.00000\.mds"):
        read_all(tmp_path)


def test_mds_that_is_of_no_use(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", {"text": "pkl"}, [{"text": "x"}])
    with pytest.raises(InputError, match=r"it has: text \(pkl\)"):  # whose bytes would be a program
        read_all(tmp_path / "a")
    write_mds(tmp_path / "b", {"tokens": "bytes", "n": "int"}, [{"tokens": b"x", "n": 3}])
    with pytest.raises(InputError, match=r"it has: n \(int\), tokens \(bytes\)"):
        read_all(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "index.json").write_text("[]")
    with pytest.raises(InputError, match="is not the index of an MDS folder"):
        find([str(tmp_path / "c")])


@pytest.mark.parametrize("name", ["../out/shard.00000.mds", "/etc/passwd", "link", "to/shard.00000.mds", "", 3, "a\0b"])
def test_mds_that_leads_out_of_its_folder(name: object, tmp_path: Path) -> None:
    write_mds(tmp_path / "out", {"text": "str"}, [{"text": "secret"}])
    inside = write_mds(tmp_path / "in", {"text": "str"}, [{"text": "x"}])
    (inside / "link").symlink_to(tmp_path / "out/shard.00000.mds")
    (inside / "to").symlink_to(tmp_path / "out")
    index = json.loads((inside / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = name
    (inside / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError):
        find([str(inside)])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"shards": [3]}', '{"shards": [{"raw_data": "x", "zip_data": null}]}']
)
def test_mds_with_a_hostile_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(InputError):
        find([str(tmp_path)])


def test_an_mds_shard_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": "x"}])
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"shards": index["shards"] * 2}))
    assert contents(read_all(folder)) == ["x"]
