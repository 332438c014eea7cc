"""Published files are received from a local server: verified, continued after an interruption, and never replaced."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.storage import published
from hybridtron.storage.published import DATA_SETS, RECORD, DownloadError, RemoteFile, download, download_file
from tests.refusals import raises_code
from tests.storage.publisher import COMMIT, Publisher, publishing_as_hub

DATA = bytes(range(256)) * 20_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    with publishing_as_hub(monkeypatch) as running:
        yield running


def fetch(source: str, folder: Path) -> list[Path]:
    return download(source, folder, DATA_SETS, [".jsonl"], lambda name, done, size: None)


def test_a_url_is_received_once_and_recorded(server: Publisher, tmp_path: Path) -> None:
    server.files["/some/part.jsonl"] = DATA
    source = f"{server.url}/some/part.jsonl"
    (path,) = fetch(source, tmp_path)
    assert path.read_bytes() == DATA
    assert fetch(source, tmp_path) == [path]
    assert len(server.asked) == 1
    (entry,) = json.loads((tmp_path / RECORD).read_text())["files"].values()
    assert (entry["sha256"], entry["size"]) == (hashlib.sha256(DATA).hexdigest(), len(DATA))
    assert {file.name for file in tmp_path.iterdir()} == {"part.jsonl", RECORD}


def test_an_interrupted_download_continues(server: Publisher, tmp_path: Path) -> None:
    server.files["/part.jsonl"] = DATA
    server.cut = [3_000_000, 0, 1_000_000]
    (path,) = fetch(f"{server.url}/part.jsonl", tmp_path)
    assert path.read_bytes() == DATA
    starts = [headers.get("Range") for _, headers in server.asked]
    assert starts == [None, "bytes=3000000-", "bytes=3000000-", "bytes=4000000-"]


def test_another_command_continues_unless_the_file_has_changed(server: Publisher, tmp_path: Path) -> None:
    source = f"{server.url}/part.jsonl"
    server.files["/part.jsonl"] = DATA
    server.cut = [3_000_000, *[0] * 5]
    with raises_code(DownloadError, "unavailable", "repeat the command"):
        fetch(source, tmp_path)
    server.files["/part.jsonl"] = DATA[::-1]
    (path,) = fetch(source, tmp_path)
    assert path.read_bytes() == DATA[::-1]


def test_the_first_sha256_is_required_afterwards(server: Publisher, tmp_path: Path) -> None:
    source = f"{server.url}/part.jsonl"
    server.files["/part.jsonl"] = DATA
    (path,) = fetch(source, tmp_path)
    path.unlink()
    server.files["/part.jsonl"] = DATA + b"x"
    with raises_code(DownloadError, "changed", "SHA-256"):
        fetch(source, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {RECORD}
    path.write_bytes(b"mine")
    with raises_code(DownloadError, "changed", "move it away"):
        fetch(source, tmp_path)
    assert path.read_bytes() == b"mine"


def test_files_of_a_repository_have_the_sha256_of_the_index(server: Publisher, tmp_path: Path) -> None:
    files = {"train/a.jsonl": DATA, "train/b.jsonl": b"b", "README.md": b"#"}
    server.publish("mary/texts", files, hashed="train/a.jsonl")
    paths = fetch("hf:mary/texts", tmp_path / "all")
    assert [path.relative_to(tmp_path / "all").as_posix() for path in paths] == ["train/a.jsonl", "train/b.jsonl"]
    assert json.loads((tmp_path / "all" / RECORD).read_text())["commits"] == {"mary/texts": COMMIT}
    assert len(fetch("hf:mary/texts:*b.jsonl", tmp_path / "one")) == 1
    server.files[f"/datasets/mary/texts/resolve/{COMMIT}/train/a.jsonl"] = DATA[:-1] + b"x"
    with raises_code(DownloadError, "changed", "SHA-256"):
        fetch("hf:mary/texts", tmp_path / "new")


def test_later_downloads_stay_at_the_recorded_commit(server: Publisher, tmp_path: Path) -> None:
    server.publish("mary/texts", {"a.jsonl": b"a"})
    fetch("hf:mary/texts", tmp_path)
    del server.files["/api/datasets/mary/texts/revision/main"]
    fetch("hf:mary/texts", tmp_path)
    with raises_code(DownloadError, "unavailable", "404"):
        fetch("hf:mary/texts", tmp_path / "elsewhere")


def test_paths_of_an_index_stay_in_the_folder(server: Publisher, tmp_path: Path) -> None:
    server.publish("mary/texts", {"../out.jsonl": b"a"})
    with raises_code(DownloadError, "unsupported", "out.jsonl"):
        fetch("hf:mary/texts", tmp_path / "in")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_token_is_for_its_own_server(server: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    server.publish("mary/texts", {"a.jsonl": b"a"})
    other = f"http://localhost:{server.server_port}"
    server.moves[f"/datasets/mary/texts/resolve/{COMMIT}/a.jsonl"] = f"{other}/stored"
    server.files["/stored"] = b"a"
    fetch("hf:mary/texts", tmp_path)
    tokens = {path: headers.get("Authorization") for path, headers in server.asked}
    assert tokens["/api/datasets/mary/texts/revision/main"] == "Bearer secret"
    assert tokens["/stored"] is None


def test_a_refused_download_names_the_token_of_its_server_alone(server: Publisher, tmp_path: Path) -> None:
    server.publish("mary/texts", {"a.jsonl": b"a"})
    del server.files[f"/datasets/mary/texts/resolve/{COMMIT}/a.jsonl"]
    with raises_code(DownloadError, "unavailable", "check the address and HF_TOKEN, or"):
        fetch("hf:mary/texts", tmp_path)
    with raises_code(DownloadError, "unavailable", "check the address, or"):
        fetch(f"http://localhost:{server.server_port}/a.jsonl", tmp_path)


def test_a_download_that_was_complete_before_its_end_is_kept(server: Publisher, tmp_path: Path) -> None:
    server.files["/part.jsonl"] = DATA
    source = f"{server.url}/part.jsonl"
    (path,) = fetch(source, tmp_path / "first")
    partial = tmp_path / "second/.part.jsonl.temporary"
    partial.parent.mkdir()
    partial.write_bytes(DATA)
    partial.with_name(f"{partial.name}.etag").write_text(f'"{hashlib.md5(DATA).hexdigest()}"')
    assert fetch(source, tmp_path / "second")[0].read_bytes() == path.read_bytes()
    assert len(server.asked) == 2


def test_another_part_than_the_rest_is_not_appended(server: Publisher, tmp_path: Path) -> None:
    server.files["/part.jsonl"] = DATA
    server.cut = [3_000_000]
    server.shift = 100
    (path,) = fetch(f"{server.url}/part.jsonl", tmp_path)
    assert path.read_bytes() == DATA


def test_short_files_without_a_sha256_are_refused(server: Publisher, tmp_path: Path) -> None:
    server.publish("mary/texts", {"a.jsonl": DATA})
    server.files[f"/datasets/mary/texts/resolve/{COMMIT}/a.jsonl"] = DATA[:-1]
    server.says_length = False
    with raises_code(DownloadError, "changed", "compare with the publisher if the size stays"):
        fetch("hf:mary/texts", tmp_path)


def test_a_file_that_is_too_long_is_not_read_to_its_end(server: Publisher, tmp_path: Path) -> None:
    server.files["/part.jsonl"] = DATA
    received: list[int] = []
    file = RemoteFile("part.jsonl", f"{server.url}/part.jsonl", 1000, hashlib.sha256(DATA).hexdigest())
    with raises_code(DownloadError, "changed", "more than 1000 bytes"):
        download_file(file, tmp_path, lambda name, done, size: received.append(done))
    assert received == [published.PIECE]
    assert list(tmp_path.iterdir()) == []


def test_a_known_file_may_move_to_another_address(server: Publisher, tmp_path: Path) -> None:
    file = RemoteFile("part.jsonl", f"{server.url}/old/part.jsonl", len(DATA), hashlib.sha256(DATA).hexdigest())
    server.files["/old/part.jsonl"] = DATA
    path = download_file(file, tmp_path, lambda name, done, size: None)
    moved = dataclasses.replace(file, url=f"{server.url}/new/part.jsonl")
    assert download_file(moved, tmp_path, lambda name, done, size: None) == path


@pytest.mark.parametrize("stored", [True, False])
def test_data_sets_with_equal_file_names_need_two_folders(server: Publisher, tmp_path: Path, stored: bool) -> None:
    """Also if the index has the other file's SHA-256, and if the first file is gone."""
    for author, data in (("mary", DATA), ("john", DATA[::-1])):
        server.publish(f"{author}/texts", {"a.jsonl": data}, hashed="a.jsonl")
    (path,) = fetch("hf:mary/texts", tmp_path)
    if not stored:
        path.unlink()
    record = (tmp_path / RECORD).read_bytes()
    with raises_code(DownloadError, "conflict", "use another folder"):
        fetch("hf:john/texts", tmp_path)
    assert path.exists() == stored
    assert json.loads((tmp_path / RECORD).read_text())["files"] == json.loads(record)["files"]


def test_files_of_others_are_not_taken_for_published_ones(server: Publisher, tmp_path: Path) -> None:
    server.files["/part.jsonl"] = DATA
    (tmp_path / "part.jsonl").write_bytes(b"mine")
    with raises_code(DownloadError, "conflict", "move it away"):
        fetch(f"{server.url}/part.jsonl", tmp_path)
    with raises_code(DownloadError, "conflict", RECORD):
        fetch(f"{server.url}/{RECORD}", tmp_path)
