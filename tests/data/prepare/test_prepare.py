"""Preparation from inputs to folder: the written files, which are always the same."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from hybridtron.data.prepare import tokenized as tokenized_module
from hybridtron.data.prepare.documents import ArgumentError, InputError, in_validation
from hybridtron.data.prepare.embedded import END_OF_TEXT
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.tokenized import cut
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.problems import Code
from tests.data.mosaic import MDSWriter
from tests.data.prepare.preparing import (
    TEXTS,
    all_documents,
    contents_of,
    lines_of,
    stored,
    texts,
    words,
    write_jsonl,
)
from tests.refusals import raises_code

SETTINGS = FolderSettings(validation=0.2, shard_size=1024)


def write_tokens(folder: Path, documents: list[list[int]]) -> Path:
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint32"}) as writer:
        for document in documents:
            writer.write({"tokens": np.array(document, np.uint32)})
    return folder


def test_prepared_tokens_are_those_of_the_tokenizer(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    folder = prepare(find([str(inputs)]).inputs, tmp_path / "out", vocabulary, SETTINGS)
    tokenizer = Tokenizer.from_str(vocabulary.json)
    tokenizer.encode_special_tokens = True
    for split in ("train", "validation"):
        expected = [
            [*tokenizer.encode(text).ids, vocabulary.eos]
            for number in range(4)
            for text in texts(60, f"{number}-")
            if in_validation(text, 0.2) == (split == "validation")
        ]
        assert stored(folder, split, "text") == expected
        assert all(vocabulary.eos not in tokens[:-1] for tokens in expected)
    splits = folder.manifest.splits
    assert {shard.file.split("/")[0] for shard in splits["train"]["text"].shards} == {f"part-{n:05}" for n in range(4)}
    assert len(splits["train"]["text"].shards) > 4
    origin = folder.manifest.origin
    assert (origin["inputs"], origin["validation"], origin["eos_token"]) == (4, 0.2, END_OF_TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train",
        "validation",
    ]


def test_moved_inputs_change_no_byte(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    before = prepare(find([str(inputs)]).inputs, tmp_path / "a", vocabulary, SETTINGS)
    inputs.rename(tmp_path / "moved")
    after = prepare(find([str(tmp_path / "moved")]).inputs, tmp_path / "b", vocabulary, SETTINGS)
    assert before.digest == after.digest


def test_compressed_shards_hold_the_same_documents(inputs: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    data_inputs = find([str(inputs)]).inputs
    plain = prepare(data_inputs, tmp_path / "plain", vocabulary, SETTINGS)
    settings = dataclasses.replace(SETTINGS, compression="zstd:3")
    packed = prepare(data_inputs, tmp_path / "packed", vocabulary, settings)
    assert all_documents(packed) == all_documents(plain)
    assert list(packed.path.rglob("*.mds.zstd"))
    assert not list(packed.path.rglob("*.mds"))


def test_copies_of_a_document_are_on_one_side(vocabulary: Vocabulary, tmp_path: Path) -> None:
    contents = [f"document {number}" for number in range(2000)]
    write_jsonl(tmp_path / "in/a.jsonl", contents)
    write_jsonl(tmp_path / "in/b.jsonl.zst", contents[::-1])
    folder = prepare(find([str(tmp_path / "in")]).inputs, tmp_path / "out", vocabulary, FolderSettings(validation=0.05))
    held_out = stored(folder, "validation", "text")
    half = len(held_out) // 2
    assert held_out[:half] == held_out[half:][::-1]
    assert 60 < half < 140
    assert not {tuple(tokens) for tokens in held_out} & {tuple(tokens) for tokens in stored(folder, "train", "text")}
    without = prepare(find([str(tmp_path / "in")]).inputs, tmp_path / "all", vocabulary, FolderSettings(validation=0))
    assert without.manifest.splits["validation"] == {}
    assert without.manifest.tokens("train") == folder.manifest.tokens("train") + folder.manifest.tokens("validation")


def test_eos_of_prepared_tokens_is_not_doubled(tmp_path: Path) -> None:
    """eos is not doubled, and a document of eos alone is left out. The split does not depend on either."""
    vocabulary = words(300)
    write_tokens(tmp_path / "in", [[5, 6], [7, 8, 299], [299], [9]])
    folder = prepare(find([str(tmp_path / "in")]).inputs, tmp_path / "out", vocabulary, FolderSettings(validation=0))
    assert all_documents(folder) == [[5, 6, 299], [7, 8, 299], [9, 299]]
    assert folder.manifest.origin["empty"] == 1
    assert in_validation(np.array([5, 6], np.int64), 0.5) == in_validation(np.array([5, 6], np.uint16), 0.5)


@pytest.mark.parametrize(("entries", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_smallest_dtype_is_taken(entries: int, dtype: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "in", [[1, entries - 2]])
    folder = prepare(
        find([str(tmp_path / "in")]).inputs, tmp_path / "out", words(entries), FolderSettings(validation=0)
    )
    assert (folder.manifest.dtype, folder.manifest.vocab_size) == (dtype, entries)
    assert all_documents(folder) == [[1, entries - 2, entries - 1]]


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "in", [[1], [2, 300]])
    with raises_code(InputError, "mismatch", "sample 1", "token 300", "299"):
        prepare(find([str(tmp_path / "in")]).inputs, tmp_path / "out", words(300))


def test_a_document_larger_than_a_shard_stands_alone(vocabulary: Vocabulary, tmp_path: Path) -> None:
    contents = ["x y z " * 2000, "short", "x y z " * 3000, "short too"]
    write_jsonl(tmp_path / "a.jsonl", contents)
    settings = FolderSettings(validation=0, shard_size=2000)
    folder = prepare(find([str(tmp_path / "a.jsonl")]).inputs, tmp_path / "out", vocabulary, settings)
    shards = folder.manifest.splits["train"]["text"].shards
    assert [shard.documents for shard in shards] == [1, 1, 1, 1]
    assert len(stored(folder, "train", "text")) == 4


def test_a_document_too_large_for_the_format_is_named(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized_module, "MAX_DOCUMENT_BYTES", 100)
    write_jsonl(tmp_path / "a.jsonl", ["short", "long " * 100])
    with raises_code(InputError, "does-not-fit", "a.jsonl, line 2", "100"):
        prepare(find([str(tmp_path / "a.jsonl")]).inputs, tmp_path / "out", vocabulary)


def test_a_huge_text_is_tokenized_in_pieces(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized_module, "PIECE", 500)
    monkeypatch.setattr(tokenized_module, "NEAR", 200)
    lines = "".join(f"a line  {number}\n" + "\n  " * (number % 5 == 0) for number in range(200))
    without = "x" * 1700
    assert "".join(cut(lines)) == lines
    assert "".join(cut(without)) == without
    assert len(list(cut(lines))) == 5
    assert list(cut("short")) == ["short"]
    write_jsonl(tmp_path / "a.jsonl", ["before", lines, "after", without])
    folder = prepare(
        find([str(tmp_path / "a.jsonl")]).inputs, tmp_path / "out", vocabulary, FolderSettings(validation=0)
    )
    tokenizer = vocabulary.tokenizer()
    before, whole, after, last = stored(folder, "train", "text")
    assert [before, whole, after] == [[*tokenizer.encode(t).ids, vocabulary.eos] for t in ("before", lines, "after")]
    assert tokenizer.decode(last[:-1]) == without


def test_bad_lines_are_counted_against_max_bad(
    vocabulary: Vocabulary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS * 2)
    (tmp_path / "in/b.jsonl").write_bytes(lines_of(TEXTS) + b"{}\n[]\n")
    data_inputs = find([str(tmp_path / "in")]).inputs
    with raises_code(InputError, "malformed", "b.jsonl: 2 of 7", "--max-bad 0.001 "):
        prepare(data_inputs, tmp_path / "out", vocabulary, SETTINGS)
    assert (tmp_path / "out.partial/records/part-00000.npz").exists()
    folder = prepare(data_inputs, tmp_path / "out", vocabulary, SETTINGS, max_bad=0.2)
    output = capsys.readouterr().err
    assert "resuming: 1 of 2 inputs are finished" in output
    assert "b.jsonl: 2 of 7 lines" in output
    assert "\n  line 6: " in output
    assert "\n  line 7: " in output
    assert folder.manifest.origin["bad"] == 2
    assert len(all_documents(folder)) == 15


def test_small_files_share_shards(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """Files of every format give the same few shards, named by folder or pattern, with any number of workers."""
    for number, text in enumerate(texts(300)):
        (tmp_path / f"txt/{number % 7}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"txt/{number % 7}/{number}.txt").write_text(text, newline="")
    for number in range(20):
        write_jsonl(tmp_path / f"txt/lines/{number}.jsonl", texts(3, f"{number}-"))
    settings = FolderSettings(validation=0, shard_size=8192)
    patterns = [str(tmp_path / f"txt/**/*.{suffix}") for suffix in ("txt", "jsonl")]
    folder = prepare(find(patterns).inputs, tmp_path / "out", vocabulary, settings)
    (source,) = folder.manifest.splits["train"].values()
    assert source.documents == 360
    sizes = [shard.size for shard in source.shards]
    assert len(sizes) <= 2 * sum(sizes) / settings.shard_size + 1
    shutil.rmtree(tmp_path / "txt/lines")
    inputs = find([str(tmp_path / "txt")]).inputs
    by_folder = prepare(inputs, tmp_path / "folder", vocabulary, settings, workers=2)
    by_pattern = prepare(find(patterns[:1]).inputs, tmp_path / "pattern", vocabulary, settings)
    assert contents_of(by_folder.path) == contents_of(by_pattern.path)


def test_inputs_without_documents_are_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with raises_code(InputError, "missing", "a.jsonl"):
        prepare(find([str(tmp_path / "a.jsonl")]).inputs, tmp_path / "out", vocabulary)


@pytest.mark.parametrize(
    ("settings", "workers", "option", "code"),
    [
        (FolderSettings(validation=1.5), 1, "--validation", "out-of-range"),
        (FolderSettings(shard_size=100), 1, "--shard-size", "out-of-range"),
        (FolderSettings(shard_size=2**32), 1, "--shard-size", "out-of-range"),
        (FolderSettings(compression="zstd:99"), 1, "--compression", "unknown-name"),
        (FolderSettings(compression="lz4"), 1, "--compression", "unknown-name"),
        (FolderSettings(), 0, "--workers", "out-of-range"),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: FolderSettings, workers: int, option: str, code: Code, tmp_path: Path
) -> None:
    with raises_code(ArgumentError, code, option):
        prepare([], tmp_path / "out", words(300), settings, workers)
    assert not list(tmp_path.iterdir())
