"""The folder format, its writer, and refusals when a folder is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.prepare.writer import write_folder
from hybridtron.storage.digest import digest_of
from tests.data.mosaic import MDSReader
from tests.refusals import raises_code


def documents_by_streaming(folder: TokenFolder, split: str, source: str, column: str = "tokens") -> list[list[int]]:
    """Return the documents that mosaicml-streaming's own reader finds in a source."""
    path = folder.source_path(split, source)
    entries = json.loads((path / "index.json").read_text())["shards"]
    readers = [MDSReader.from_json(str(path), None, entry) for entry in entries]
    return [sample[column].tolist() for reader in readers for sample in reader]


def test_written_documents_are_read_back(tmp_path: Path):
    splits = {"train": {"web": [[5, 6], np.array([7]), []], "code": [[9]]}, "validation": {"web": [[8, 69_999]]}}
    folder = write_folder(tmp_path / "a" / "data", splits, '{"a": "é"}', 70_000, 1, {"corpus": "toy"})
    assert folder == TokenFolder.open(tmp_path / "a" / "data")
    assert documents_by_streaming(folder, "train", "web") == [[5, 6, 1], [7, 1], [1]]
    assert documents_by_streaming(folder, "train", "code") == [[9, 1]]
    assert documents_by_streaming(folder, "validation", "web") == [[8, 69_999, 1]]
    assert folder.lengths("train", "web").tolist() == [3, 2, 1]
    manifest = folder.manifest
    assert (manifest.dtype, manifest.eos, manifest.vocab_size, manifest.tokens("train")) == ("uint32", 1, 70_000, 8)
    assert {split: list(sources) for split, sources in manifest.splits.items()} == {
        "train": ["code", "web"],
        "validation": ["web"],
    }
    assert folder.tokenizer_file.read_text(encoding="utf-8") == '{"a": "é"}'


def test_a_folder_without_masks_keeps_its_bytes_of_earlier_versions(tmp_path: Path):
    """The manifest's digest covers all files; it equals that of the version before masks existed."""
    splits = {"train": {"text": [[5, 6, 7], [8]]}, "validation": {"text": [[9]]}}
    folder = write_folder(tmp_path / "data", splits, "{}", 10, 0, {"corpus": "toy"})
    assert folder.digest == "acde165049b3304ed2cc6d495fd40f27"
    assert folder.manifest.splits["train"]["text"].learned is None


def test_masks_are_a_column_beside_the_tokens(tmp_path: Path):
    splits = {"train": {"web": [[5, 6], [7], []]}, "validation": {"web": [[8]]}}
    masks = {"train": {"web": [[0, 1, 1], [1, 0], [0]]}, "validation": {"web": [[1, 1]]}}
    arrays = {split: {"web": [np.array(mask) for mask in of["web"]]} for split, of in masks.items()}
    folder = write_folder(tmp_path / "data", splits, "{}", 10, 0, {}, masks=arrays)
    assert folder == TokenFolder.open(tmp_path / "data")
    assert documents_by_streaming(folder, "train", "web") == [[5, 6, 0], [7, 0], [0]]
    assert documents_by_streaming(folder, "train", "web", "mask") == masks["train"]["web"]
    assert [folder.manifest.splits[split]["web"].learned for split in splits] == [3, 2]


def test_shards_hold_the_documents_of_the_manifest(make_folder: Callable[..., TokenFolder]):
    folder = make_folder(train=tuple(range(1, 41)))
    split = folder.manifest.splits["train"]["text"]
    assert len(split.shards) > 3
    assert split.documents == 40
    assert split.tokens == sum(range(2, 42))
    lengths = folder.lengths("train", "text")
    first = 0
    for shard in split.shards:
        assert lengths[first : first + shard.documents].sum() == shard.tokens
        first += shard.documents


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_tokens_take_two_bytes_where_they_fit(tmp_path: Path, vocab: int, dtype: str):
    splits = {"train": {"text": [[vocab - 1]]}, "validation": {}}
    folder = write_folder(tmp_path / "data", splits, "{}", vocab, 0, {})
    assert folder.manifest.dtype == dtype
    assert documents_by_streaming(folder, "train", "text") == [[vocab - 1, 0]]


def test_a_second_writer_keeps_the_first_folder(tmp_path: Path):
    splits = {"train": {"text": [[5]]}, "validation": {}}
    first = write_folder(tmp_path / "data", splits, "{}", 10, 0, {})
    again = write_folder(tmp_path / "data", {"train": {"text": [[6]]}, "validation": {}}, "{}", 10, 0, {})
    assert again == first
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    def documents() -> Iterator[list[int]]:
        yield [1, 2]
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_folder(tmp_path / "data", {"train": {"text": documents()}, "validation": {}}, "{}", 10, 0, {})
    with pytest.raises(ValueError, match=r"document 1 .* part-00000 .*0 to 9"):
        write_folder(tmp_path / "data", {"train": {"text": [[1], [10]]}, "validation": {}}, "{}", 10, 0, {})
    assert not list(tmp_path.iterdir())


def edit_manifest(folder: Path, key: str, value: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))


def edit_first_shard(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["text"]["shards"][0].update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def empty_shard(folder: Path) -> None:
    """Truncate a shard to 0 bytes, and state that size and digest in the manifest."""
    (folder / SHARD).write_bytes(b"")
    edit_first_shard(folder, size=0, digest=digest_of(b""))
    edit_manifest(folder, "digest", None)


SHARD = "train/text/part-00000/shard.00000.mds"
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated shard": (lambda p: cut(p / SHARD), ["truncated", SHARD]),
    "emptied shard": (lambda p: (p / SHARD).write_bytes(b""), ["empty", f"{SHARD} has 0 of"]),
    "long shard": (lambda p: (p / SHARD).write_bytes(bytes(1000)), ["too long", f"{SHARD} has 1000 of"]),
    "no shard": (lambda p: (p / SHARD).unlink(), [SHARD]),
    "no index": (lambda p: (p / "train/text/index.json").unlink(), ["train/text/index.json"]),
    "no lengths": (lambda p: (p / "validation/text/lengths.npy").unlink(), ["validation/text/lengths.npy"]),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), ["manifest.json"]),
    "another tokenizer": (lambda p: (p / "tokenizer.json").write_text("{ }"), ["tokenizer.json", "digest"]),
    "torn manifest": (lambda p: cut(p / "manifest.json"), ["manifest.json"]),
    "old format": (lambda p: edit_manifest(p, "format", 1), ["format 1", "format 2"]),
    "unknown dtype": (lambda p: edit_manifest(p, "dtype", "int8"), ["dtype 'int8'"]),
    "no validation": (lambda p: edit_manifest(p, "splits", {"train": {}}), ["manifest.json", "validation"]),
    "empty shard": (lambda p: empty_shard(p), ["train/text: shard 0", "0 bytes"]),
    "shard outside": (lambda p: edit_first_shard(p, file="../../x"), ["'train/text/../../x'"]),
    "absolute shard": (lambda p: edit_first_shard(p, file="/etc/passwd"), ["'train/text//etc/passwd'"]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused(toy: TokenFolder, kind: str):
    damage, names = DAMAGE[kind]
    damage(toy.path)
    with raises_code(FolderError, "unreadable", *names) as raised:
        TokenFolder.open(toy.path)
    assert str(raised.value).startswith(str(toy.path))


def test_lengths_that_differ_from_their_digest_are_refused(toy: TokenFolder):
    file = toy.source_path("train", "text") / "lengths.npy"
    lengths = np.load(file)
    lengths[0] += 1
    np.save(file, lengths)
    with raises_code(FolderError, "unreadable", "lengths.npy"):
        toy.lengths("train", "text")


def test_missing_folders_and_files_are_refused(tmp_path: Path):
    with raises_code(FolderError, "no-file", "none"):
        TokenFolder.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with raises_code(FolderError, "unreadable", "file"):
        TokenFolder.open(tmp_path / "file")


def test_opening_needs_no_torch():
    """Opening a folder is part of the answer to a wrong command line, which comes within a second."""
    code = "import sys, hybridtron.data.problems; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHANGES = [
    *({"eos": value} for value in (None, "x", -1, 999, 1.0, True)),
    *({"vocab_size": value} for value in ("x", -1, 0, None, 2**80)),
    *({"origin": value} for value in (None, 3)),
    {"tokenizer": 3},
    {"compression": 3},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_manifest_with_impossible_values_is_refused(toy: TokenFolder, change: dict, sealed: bool):
    """Folders of earlier versions have no digest of their own, and an edited one may have a digest that fits."""
    edit_manifest(toy.path, *next(iter(change.items())))
    if not sealed:
        edit_manifest(toy.path, "digest", None)
    with pytest.raises(FolderError):
        TokenFolder.open(toy.path)


@pytest.mark.parametrize("change", [{"documents": "a"}, {"tokens": None}, {"size": -1}, {"packed": "x"}, {"digest": 3}])
def test_a_shard_with_impossible_values_is_refused(toy: TokenFolder, change: dict):
    edit_first_shard(toy.path, **change)
    edit_manifest(toy.path, "digest", None)
    with pytest.raises(FolderError):
        TokenFolder.open(toy.path)


def test_a_changed_manifest_is_detected_by_its_digest(toy: TokenFolder):
    """The digest detects a change that nothing else would contradict; folders of earlier versions have none."""
    for key, value in (("vocab_size", 998), ("eos", 5), ("origin", {})):
        before = (toy.path / "manifest.json").read_text()
        edit_manifest(toy.path, key, value)
        with pytest.raises(FolderError):
            TokenFolder.open(toy.path)
        edit_manifest(toy.path, "digest", None)
        assert getattr(TokenFolder.open(toy.path).manifest, key) == value
        (toy.path / "manifest.json").write_text(before)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train/text/index.json", "train/text/lengths.npy"])
def test_irregular_files_are_not_read(toy: TokenFolder, name: str):
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (toy.path / name).rename(toy.path / "elsewhere")
        make(toy.path / name)
        with pytest.raises(FolderError):
            TokenFolder.open(toy.path)
        if (toy.path / name).is_dir():
            (toy.path / name).rmdir()
        else:
            (toy.path / name).unlink()
        (toy.path / "elsewhere").rename(toy.path / name)


@pytest.mark.parametrize(
    ("masks", "numbers"), [([[1, 1, 1]], "them is 1"), ([[1, 1, 1], [1, 1]], "2 entries"), ([[1] * 3] * 3, "them is 2")]
)
def test_masks_that_do_not_fit_the_documents_are_refused(masks: list[list[int]], numbers: str, tmp_path: Path) -> None:
    documents = [np.array([1, 2]), np.array([3, 4])]
    of_text = [np.array(mask, np.uint8) for mask in masks]
    with pytest.raises(ValueError, match=numbers):
        write_folder(
            tmp_path / "out", {"train": {"text": documents}}, "{}", 8, 0, {}, masks={"train": {"text": of_text}}
        )
    assert list(tmp_path.iterdir()) == []
