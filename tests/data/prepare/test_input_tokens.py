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
from tests.refusals import raises_code

TOKENS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [300, 301]]


def test_megatron_documents_are_read(tmp_path: Path) -> None:
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
    for name, cut, numbers in (("small.bin", 2, [11, 10]), ("large.idx", 9, [])):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-cut])
        with raises_code(InputError, "unreadable", name, *numbers):
            read_all(tmp_path / name)
    (tmp_path / "small.idx").write_bytes(b"something else")
    with raises_code(InputError, "unreadable", "small.idx"):
        read_all(tmp_path / "small.bin")


def packed(tokens: list[int], code: int = 8, dtype: str = "<u2") -> bytes:
    return b"LITPKDS" + struct.pack("<QBQ", 1, code, len(tokens)) + np.array(tokens, dtype).tobytes()


def test_packed_tokens_are_split_at_separators(tmp_path: Path) -> None:
    file = tmp_path / "train_0000.bin"
    reading = InputOptions(separator=1)
    for code, dtype in ((8, "<u2"), (4, "<i4")):
        file.write_bytes(packed([7, 7, 1, *TOKENS[0], 1, 1, *TOKENS[3], 1, 1, 1], code, dtype))
        assert contents(read_all(file, reading=reading)) == [[7, 7], TOKENS[0], TOKENS[3]]
    tally = Tally("a", "documents", 0)
    list(read(find([str(file)]).inputs[0], reading, tally))
    assert "may be parts of longer" in tally.remarks[0]
    with raises_code(InputError, "mismatch", "token 2", "--separator"):
        read_all(file, reading=InputOptions(separator=2))
    file.write_bytes(packed([1, 2, 3])[:-2])
    with raises_code(InputError, "unreadable", "3 tokens", " 2"):
        read_all(file, reading=reading)
    file.write_bytes(packed([1, 2, 3], 6, "<f4"))
    with raises_code(InputError, "wrong-type", file):
        read_all(file, reading=reading)


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict], compression: str | None = None) -> Path:
    with MDSWriter(
        out=str(folder), columns=columns, compression=compression, hashes=["sha1", "xxh64"], size_limit=500
    ) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_mds_folders_of_text_and_tokens_are_read(compression: str | None, tmp_path: Path) -> None:
    samples = [{"text": text, "n": 1} for text in TEXTS]
    write_mds(tmp_path / "text", {"text": "str", "n": "int"}, samples, compression)
    for name, dtype in (("a", "uint16"), ("b", "int64")):
        arrays = [{"tokens": np.array(tokens, dtype)} for tokens in TOKENS]
        write_mds(tmp_path / name, {"tokens": f"ndarray:{dtype}"}, arrays, compression)
    text_inputs = find([str(tmp_path / "text")])
    assert len(text_inputs.inputs) > 1
    assert contents(read_all(tmp_path / "text/index.json")) == TEXTS
    assert contents(read_all(tmp_path)) == TOKENS + TOKENS + TEXTS
    shard = text_inputs.inputs[0].files[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with raises_code(InputError, "unreadable", shard, "sha1", "index.json"):
        read_all(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    with raises_code(InputError, "unreadable", shard, f"{shard.stat().st_size} bytes", "index.json"):
        read_all(tmp_path)
    shard.unlink()
    with raises_code(InputError, "no-file", "shard.00000.mds"):
        read_all(tmp_path)


def test_unusable_mds_folders_are_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", {"text": "pkl"}, [{"text": "x"}])
    with raises_code(InputError, "missing", "text (pkl)"):  # whose bytes would be a program
        read_all(tmp_path / "a")
    write_mds(tmp_path / "b", {"tokens": "bytes", "n": "int"}, [{"tokens": b"x", "n": 3}])
    with raises_code(InputError, "missing", "n (int), tokens (bytes)"):
        read_all(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "index.json").write_text("[]")
    with raises_code(InputError, "unreadable", "index.json"):
        find([str(tmp_path / "c")])


@pytest.mark.parametrize("name", ["../out/shard.00000.mds", "/etc/passwd", "link", "to/shard.00000.mds", "", 3, "a\0b"])
def test_mds_paths_outside_the_folder_are_refused(name: object, tmp_path: Path) -> None:
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
def test_hostile_mds_indexes_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(InputError):
        find([str(tmp_path)])


def test_an_mds_shard_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": "x"}])
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"shards": index["shards"] * 2}))
    assert contents(read_all(folder)) == ["x"]
