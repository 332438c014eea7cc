"""Every format that can be prepared, from files made by hand or by the format's own tools."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridtron.data.prepare import documents, input_files, inputs
from hybridtron.data.prepare.documents import ArgumentError, InputError, InputOptions, Tally, clean_name
from hybridtron.data.prepare.formats import read
from hybridtron.data.prepare.input_files import find
from tests.data.prepare.preparing import TEXTS, contents, lines_of, read_all, write_jsonl, zstd


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.JSONL.ZST", "c4-train.00001.json.gz"])
def test_json_lines(name: str, tmp_path: Path) -> None:
    found = read_all(write_jsonl(tmp_path / name, TEXTS))
    assert contents(found) == TEXTS
    assert {one.source for one in found} == {"text"}
    assert found[2].where == f"{tmp_path / name}, line 3"


def test_json_lines_of_other_systems(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf" + lines_of(TEXTS).replace(b"\n", b"\r\n\r\n")
    (tmp_path / "a.jsonl").write_bytes(marked.rstrip())
    assert contents(read_all(tmp_path / "a.jsonl")) == TEXTS
    (tmp_path / "b.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd(lines_of(TEXTS)))
    assert contents(read_all(tmp_path / "b.jsonl.zst")) == TEXTS
    (tmp_path / "gzip in truth.jsonl").write_bytes(zstd(lines_of(TEXTS)))
    assert contents(read_all(tmp_path / "gzip in truth.jsonl")) == TEXTS
    (tmp_path / "c.jsonl").write_text('{"body": "x", "text": 3}\n')
    assert contents(read_all(tmp_path / "c.jsonl", reading=InputOptions("body"))) == ["x"]


def test_slimpajama(tmp_path: Path) -> None:
    for chunk, name in (("chunk2", "RedPajamaC4"), ("chunk10", "Red Pajama (Github)")):
        file = tmp_path / "train" / chunk / "example_0.jsonl.zst"
        file.parent.mkdir(parents=True)
        file.write_bytes(zstd(json.dumps({"text": chunk, "meta": {"redpajama_set_name": name}}).encode()))
    for pattern in ("train/chunk*/*.jsonl.zst", "**/*.zst", "", "train"):
        found = read_all(tmp_path / pattern)
        assert [(one.content, one.source) for one in found] == [
            ("chunk10", "Red-Pajama-Github"),
            ("chunk2", "RedPajamaC4"),
        ]


BAD_LINES = {
    b'{"text": "torn': "Unterminated string",
    b'{"txt": "x"}': "has no key 'text'",
    b'{"text": ["x"]}': "'text' is a list, not a string",
    b'{"text": null}': "'text' is a NoneType",
    b'"text"': "is a JSON str, not an object",
    b'{"text": "caf\xe9"}': "can't decode byte 0xe9",
    b'{"text": "\\ud83d"}': "surrogates not allowed",
    b"[" * 100_000: "recursion",
    b"\x00\x01": "Expecting value",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_reported_and_left_out(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS[:2]) + line + b"\n" + lines_of(TEXTS[2:]))
    tally = Tally("a.jsonl", "lines", 0.001)
    assert contents(list(read(find([str(tmp_path / "a.jsonl")]).inputs[0], InputOptions(), tally))) == TEXTS
    assert (tally.bad, tally.entries) == (1, 6)
    assert "a.jsonl: 1 of 6 lines are bad and left out\n  line 3: " in tally.bad_entries()
    assert BAD_LINES[line] in tally.bad_entries()
    tally.judge()
    with pytest.raises(InputError, match="--max-bad 0 allows less"):
        dataclasses.replace(tally, max_bad=0.0).judge()


def test_the_share_of_bad_lines_is_rounded_up() -> None:
    for entries, share, allowed in ((10, 0.001, 1), (1000, 0.001, 1), (1001, 0.001, 2), (100, 0.07, 7), (10, 0, 0)):
        Tally("a", "lines", share, entries, allowed).judge()
        with pytest.raises(InputError):
            Tally("a", "lines", share, entries, allowed + 1).judge()


def test_a_file_without_a_good_line_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "HOPELESS", 30)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 100)
    with pytest.raises(InputError, match=r"30 of 30 .*\n.*line 1: has no key 'text'(.|\n)*and 25 more\nnot one"):
        read_all(tmp_path / "a.jsonl")


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    tally = Tally("a", "lines", 0)
    (tmp_path / "a.jsonl").write_bytes(lines_of(["", " \n\t", "x"]))
    assert contents(list(read(find([str(tmp_path / "a.jsonl")]).inputs[0], InputOptions(), tally))) == ["x"]
    assert (tally.empty, tally.bad) == (2, 0)
    (tmp_path / "none.jsonl").touch()
    assert read_all(tmp_path / "none.jsonl") == []


def test_parquet(tmp_path: Path) -> None:
    names = ["A (b)", None, "C", "C", "C"]
    table = pa.table({"text": TEXTS, "meta": [{"redpajama_set_name": name, "url": ""} for name in names], "n": [1] * 5})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = read_all(tmp_path / "a.parquet")
    assert contents(found) == TEXTS
    assert [one.source for one in found] == ["A-b", "text", "C", "C", "C"]
    assert found[3].where.endswith("a.parquet, row 4")


def test_columns_of_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": pa.array([*TEXTS, None, ""]).dictionary_encode(), "n": [1] * 7}), file)
    assert contents(read_all(file, reading=InputOptions("body"), max_bad=0.001)) == TEXTS
    with pytest.raises(InputError, match="row 6: 'body' is null"):
        read_all(file, reading=InputOptions("body"))
    with pytest.raises(InputError, match=r"'text'.* --text-key .*body, n"):
        read_all(file)
    with pytest.raises(InputError, match="a column 'n' of int64, not of strings"):
        read_all(file, reading=InputOptions("n"))


def test_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "TEXT_FILES", 2)
    (tmp_path / "more").mkdir()
    for name, text in zip(("b.txt", "a.md", "more/c.TXT", "d.txt", "e.txt"), TEXTS, strict=True):
        (tmp_path / name).write_text(text, newline="")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").touch()
    found = find([str(tmp_path)])
    assert [len(one.files) for one in found.inputs] == [2, 2, 1]
    assert [file.name for file in found.unknown] == ["picture.png"]
    assert contents(read_all(tmp_path)) == [TEXTS[1], TEXTS[0], TEXTS[3], TEXTS[4], TEXTS[2]]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"latin.txt: 'utf-8' codec can't decode"):
        read_all(tmp_path / "latin.txt")


def test_a_readme_is_no_data_beside_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data/a.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("Read me.")
    assert find([str(tmp_path)]).texts == (tmp_path / "README.md",)
    assert "Read me." in contents(read_all(tmp_path, tmp_path / "README.md"))
    assert find([str(tmp_path), str(tmp_path / "*.md")]).texts == ()


def test_text_files_are_gathered_whatever_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, patterns and single files name equal inputs, in the order of their paths."""
    monkeypatch.setattr(input_files, "TEXT_FILES", 4)
    names = ["b.txt", "a/z.txt", "a/b.md", "c.txt", "a/c/d.txt", "d.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = [[tmp_path / name for name in sorted(names)[:4]], [tmp_path / name for name in sorted(names)[4:]]]
    patterns = [[""], ["**/*.txt", "**/*.md"], names, ["d.txt", "*.txt", "a"]]
    for named in patterns:
        inputs = find([str(tmp_path / pattern) for pattern in named]).inputs
        assert [list(entry.files) for entry in inputs] == expected, named


def write_parquet(file: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS}), file, write_page_checksum=True)
    return file


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_truncated_files_are_named(name: str, tmp_path: Path) -> None:
    make: Callable[[Path], Path] = write_parquet if name == "a.parquet" else lambda file: write_jsonl(file, TEXTS)
    file = make(tmp_path / name)
    data = file.read_bytes()
    for length in (len(data) - 3, len(data) // 2, 2, 0):
        file.write_bytes(data[:length])
        with pytest.raises(InputError, match=rf"{name} .*damaged or truncated: "):
            read_all(file)
    file.write_bytes(data[:40] + bytes(20) + data[60:])
    with pytest.raises(InputError):
        read_all(file)


def test_what_is_unknown_or_missing_is_reported(tmp_path: Path) -> None:
    for name in ("a.csv", "b.bin", "plan.json", ".hidden"):
        (tmp_path / name).touch()
    for name in ("a.csv", "b.bin"):
        with pytest.raises(ArgumentError, match=rf"{name} is of no known format. Known formats:\n  \*.jsonl"):
            find([str(tmp_path / name)])
    with pytest.raises(ArgumentError, match=r"no file matches .*\.jsonl"):
        find([str(tmp_path / "*.jsonl")])
    with pytest.raises(ArgumentError, match=r"there is no .*nowhere"):
        find([str(tmp_path / "nowhere")])
    with pytest.raises(ArgumentError, match="no input in"):
        find([str(tmp_path)])


def test_each_file_counts_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a[1].jsonl"):
        write_jsonl(tmp_path / name, TEXTS)
    found = find([str(tmp_path / "b.jsonl"), str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "a[1].jsonl")])
    assert [one.files[0].name for one in found.inputs] == ["a[1].jsonl", "b.jsonl"]


def test_names_of_sources() -> None:
    assert clean_name("Github (v2)") == clean_name("Github/v2") == "Github-v2"
    assert clean_name("../../etc/passwd") == "etc-passwd"
    assert clean_name("日本").startswith("source-")
    assert clean_name("日本") != clean_name("中国")
    assert len(clean_name("x" * 1000)) == 100


def test_links_multiply_nothing(tmp_path: Path) -> None:
    """A cycle, a linked sibling, hard and symbolic links to a file: each target is read once."""
    root = tmp_path / "in"
    write_jsonl(root / "z/a.jsonl", TEXTS)
    write_jsonl(root / "b.jsonl", ["b"])
    (root / "loop").symlink_to(root)
    (root / "z/up").symlink_to(root)
    (root / "a-link").symlink_to(root / "z")
    (root / "c.jsonl").symlink_to(root / "b.jsonl")
    (root / "d.jsonl").hardlink_to(root / "b.jsonl")
    read_once = [root / "b.jsonl", root / "z/a.jsonl"]
    for pattern in (root, root / "**", root / "**/**/*.jsonl", root / "loop"):
        found = find([str(pattern)])
        assert sorted(one.files[0].resolve() for one in found.inputs) == read_once
    found = find([str(root), str(root / "z"), str(root / "b.jsonl")])
    assert [one.files[0] for one in found.inputs] == read_once
    second = {name.name: first.name for name, first in find([str(root)]).repeated}
    assert second == {"loop": "in", "up": "in", "a-link": "z", "c.jsonl": "b.jsonl", "d.jsonl": "b.jsonl"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.bin", "a.txt", "a.parquet"])
def test_devices_and_pipes_are_not_opened(name: str, tmp_path: Path) -> None:
    """Opening the pipe would wait for ever, and /dev/zero has no end."""
    folder = tmp_path / "in"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        for pattern in (folder, folder / name):
            with pytest.raises(ArgumentError):
                find([str(pattern)])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_that_never_ends_takes_no_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LONGEST_LINE", 2**20)
    data = lines_of(["a"]) + b'{"text": "' + b" x" * 2**24 + b'"}\n' + lines_of(["b"])
    packed = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(packed(data))
    del data
    tracemalloc.start()
    assert contents(read_all(tmp_path / name, max_bad=0.3)) == ["a", "b"]
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_zstd_window_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """A frame's header has a window of 2 GiB, which a decoder would reserve."""
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x0b\x00\x00x")
    with pytest.raises(InputError):
        read_all(tmp_path / "a.jsonl.zst")
