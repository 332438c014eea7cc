"""Every format that can be prepared, from files made by hand or by the format's own tools."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridtron.data.prepare import documents, input_files, inputs
from hybridtron.data.prepare.documents import ArgumentError, InputError, InputOptions, Tally, clean_name
from hybridtron.data.prepare.formats import read
from hybridtron.data.prepare.input_files import find
from tests.data.prepare.preparing import TEXTS, contents, lines_of, read_all, write_jsonl, zstd
from tests.refusals import raises_code


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.JSONL.ZST", "c4-train.00001.json.gz"])
def test_json_lines_are_read_plain_and_compressed(name: str, tmp_path: Path) -> None:
    read_documents = read_all(write_jsonl(tmp_path / name, TEXTS))
    assert contents(read_documents) == TEXTS
    assert {document.source for document in read_documents} == {"text"}
    assert read_documents[2].where == f"{tmp_path / name}, line 3"


def test_json_lines_with_other_encodings_and_keys_are_read(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf" + lines_of(TEXTS).replace(b"\n", b"\r\n\r\n")
    (tmp_path / "a.jsonl").write_bytes(marked.rstrip())
    assert contents(read_all(tmp_path / "a.jsonl")) == TEXTS
    (tmp_path / "b.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd(lines_of(TEXTS)))
    assert contents(read_all(tmp_path / "b.jsonl.zst")) == TEXTS
    (tmp_path / "gzip in truth.jsonl").write_bytes(zstd(lines_of(TEXTS)))
    assert contents(read_all(tmp_path / "gzip in truth.jsonl")) == TEXTS
    (tmp_path / "c.jsonl").write_text('{"body": "x", "text": 3}\n')
    assert contents(read_all(tmp_path / "c.jsonl", reading=InputOptions("body"))) == ["x"]


def test_slimpajama_sources_are_named_by_the_lines(tmp_path: Path) -> None:
    for chunk, name in (("chunk2", "RedPajamaC4"), ("chunk10", "Red Pajama (Github)")):
        file = tmp_path / "train" / chunk / "example_0.jsonl.zst"
        file.parent.mkdir(parents=True)
        file.write_bytes(zstd(json.dumps({"text": chunk, "meta": {"redpajama_set_name": name}}).encode()))
    for pattern in ("train/chunk*/*.jsonl.zst", "**/*.zst", "", "train"):
        read_documents = read_all(tmp_path / pattern)
        assert [(document.content, document.source) for document in read_documents] == [
            ("chunk10", "Red-Pajama-Github"),
            ("chunk2", "RedPajamaC4"),
        ]


BAD_LINES = {
    "torn": b'{"text": "torn',
    "another key": b'{"txt": "x"}',
    "list": b'{"text": ["x"]}',
    "null": b'{"text": null}',
    "no object": b'"text"',
    "latin-1": b'{"text": "caf\xe9"}',
    "half a character": b'{"text": "\\ud83d"}',
    "deeply nested": b"[" * 100_000,
    "bytes": b"\x00\x01",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_reported_and_left_out(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS[:2]) + line + b"\n" + lines_of(TEXTS[2:]))
    tally = Tally("a.jsonl", "lines", 0.001)
    assert contents(list(read(find([str(tmp_path / "a.jsonl")]).inputs[0], InputOptions(), tally))) == TEXTS
    assert (tally.bad, tally.entries) == (1, 6)
    assert "a.jsonl: 1 of 6 lines " in tally.bad_entries()
    assert "\n  line 3: " in tally.bad_entries()
    tally.judge()
    with raises_code(InputError, "malformed", "--max-bad 0 "):
        dataclasses.replace(tally, max_bad=0.0).judge()


def test_the_share_of_bad_lines_is_rounded_up() -> None:
    for entries, share, allowed in ((10, 0.001, 1), (1000, 0.001, 1), (1001, 0.001, 2), (100, 0.07, 7), (10, 0, 0)):
        Tally("a", "lines", share, entries, allowed).judge()
        with pytest.raises(InputError):
            Tally("a", "lines", share, entries, allowed + 1).judge()


def test_a_file_without_a_good_line_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "HOPELESS", 30)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 100)
    with raises_code(InputError, "malformed", "30 of 30", "line 1", "'text'", "25 more"):
        read_all(tmp_path / "a.jsonl")


def reject_groups(tally: Tally, groups: int) -> None:
    """Read groups of 8 documents and an empty one, and reject the documents after each group."""
    for group in range(groups):
        tally.entries += 9
        tally.empty += 1
        for entry in range(8):
            tally.reject(f"line {9 * group + entry}", "nothing is learned")


def test_a_file_whose_documents_are_rejected_in_groups_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "HOPELESS", 30)
    with pytest.raises(InputError, match=r"32 of 36 lines(.|\n)*all of the first 36 lines are bad"):
        reject_groups(Tally("a", "lines", 0.5), 100)
    after_a_good_one = Tally("a", "lines", 0.5, entries=1)
    reject_groups(after_a_good_one, 100)
    assert after_a_good_one.bad == 800


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    tally = Tally("a", "lines", 0)
    (tmp_path / "a.jsonl").write_bytes(lines_of(["", " \n\t", "x"]))
    assert contents(list(read(find([str(tmp_path / "a.jsonl")]).inputs[0], InputOptions(), tally))) == ["x"]
    assert (tally.empty, tally.bad) == (2, 0)
    (tmp_path / "none.jsonl").touch()
    assert read_all(tmp_path / "none.jsonl") == []


def test_parquet_rows_name_their_sources(tmp_path: Path) -> None:
    names = ["A (b)", None, "C", "C", "C"]
    table = pa.table({"text": TEXTS, "meta": [{"redpajama_set_name": name, "url": ""} for name in names], "n": [1] * 5})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    rows = read_all(tmp_path / "a.parquet")
    assert contents(rows) == TEXTS
    assert [row.source for row in rows] == ["A-b", "text", "C", "C", "C"]
    assert rows[3].where.endswith("a.parquet, row 4")


def test_parquet_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": pa.array([*TEXTS, None, ""]).dictionary_encode(), "n": [1] * 7}), file)
    assert contents(read_all(file, reading=InputOptions("body"), max_bad=0.001)) == TEXTS
    with raises_code(InputError, "malformed", "row 6", "'body'"):
        read_all(file, reading=InputOptions("body"))
    with raises_code(InputError, "unknown-name", "'text'", "--text-key", "body, n"):
        read_all(file)
    with raises_code(InputError, "wrong-type", "'n'", "int64"):
        read_all(file, reading=InputOptions("n"))


def test_text_files_are_documents_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "TEXT_FILES", 2)
    (tmp_path / "more").mkdir()
    for name, text in zip(("b.txt", "a.md", "more/c.TXT", "d.txt", "e.txt"), TEXTS, strict=True):
        (tmp_path / name).write_text(text, newline="")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").touch()
    inputs_of_folder = find([str(tmp_path)])
    assert [len(group.files) for group in inputs_of_folder.inputs] == [2, 2, 1]
    assert [file.name for file in inputs_of_folder.unknown] == ["picture.png"]
    assert contents(read_all(tmp_path)) == [TEXTS[1], TEXTS[0], TEXTS[3], TEXTS[4], TEXTS[2]]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with raises_code(InputError, "malformed", "latin.txt", "utf-8"):
        read_all(tmp_path / "latin.txt")


def test_a_readme_beside_data_is_left_out(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data/a.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("Read me.")
    assert find([str(tmp_path)]).texts == (tmp_path / "README.md",)
    assert "Read me." in contents(read_all(tmp_path, tmp_path / "README.md"))
    assert find([str(tmp_path), str(tmp_path / "*.md")]).texts == ()


def test_text_files_are_grouped_alike_by_folder_pattern_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    file = tmp_path / name
    if name == "a.parquet":
        write_parquet(file)
    else:
        write_jsonl(file, TEXTS)
    data = file.read_bytes()
    for length in (len(data) - 3, len(data) // 2, 2, 0):
        file.write_bytes(data[:length])
        with raises_code(InputError, "unreadable", name):
            read_all(file)
    file.write_bytes(data[:40] + bytes(20) + data[60:])
    with pytest.raises(InputError):
        read_all(file)


def test_unknown_and_missing_inputs_are_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "b.bin", "plan.json", ".hidden"):
        (tmp_path / name).touch()
    for name in ("a.csv", "b.bin"):
        with raises_code(ArgumentError, "unsupported", name, "*.jsonl"):
            find([str(tmp_path / name)])
    with raises_code(ArgumentError, "no-file", "*.jsonl"):
        find([str(tmp_path / "*.jsonl")])
    with raises_code(ArgumentError, "no-file", "nowhere"):
        find([str(tmp_path / "nowhere")])
    with raises_code(ArgumentError, "missing", tmp_path):
        find([str(tmp_path)])


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a[1].jsonl"):
        write_jsonl(tmp_path / name, TEXTS)
    all_inputs = find(
        [str(tmp_path / "b.jsonl"), str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "a[1].jsonl")]
    )
    assert [data_input.files[0].name for data_input in all_inputs.inputs] == ["a[1].jsonl", "b.jsonl"]


def test_names_of_sources_become_parts_of_paths() -> None:
    assert clean_name("Github (v2)") == clean_name("Github/v2") == "Github-v2"
    assert clean_name("../../etc/passwd") == "etc-passwd"
    assert clean_name("日本").startswith("source-")
    assert clean_name("日本") != clean_name("中国")
    assert len(clean_name("x" * 1000)) == 100


def test_linked_files_are_read_once(tmp_path: Path) -> None:
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
        linked_inputs = find([str(pattern)])
        assert sorted(data_input.files[0].resolve() for data_input in linked_inputs.inputs) == read_once
    linked_inputs = find([str(root), str(root / "z"), str(root / "b.jsonl")])
    assert [data_input.files[0] for data_input in linked_inputs.inputs] == read_once
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
def test_an_endless_line_takes_no_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 2**20)
    data = lines_of(["a"]) + b'{"text": "' + b" x" * 2**24 + b'"}\n' + lines_of(["b"])
    packed = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(packed(data))
    del data
    tracemalloc.start()
    assert contents(read_all(tmp_path / name, max_bad=0.3)) == ["a", "b"]
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_zstd_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    """A frame's header has a window of 2 GiB, which a decoder would reserve."""
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x0b\x00\x00x")
    with pytest.raises(InputError):
        read_all(tmp_path / "a.jsonl.zst")
