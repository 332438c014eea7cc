"""Faults of the store: temporary ones are survived, and permanent ones end in an error that names them."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.manifest import DataManifest
from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DataError, DocumentStore
from hybridtron.storage.cache import CacheOptions
from hybridtron.storage.digest import digest_of
from hybridtron.storage.retry import RetryPolicy
from hybridtron.storage.s3 import Bucket
from tests.data.mds import stores
from tests.data.mds.stores import DOCUMENTS, check_whole, make_documents, opened, quick, write
from tests.refusals import raises_code
from tests.storage.s3_server import FakeS3

# the fixtures
bucket = stores.bucket
s3 = stores.s3
SHARD = "train/web/part-00000/shard.00001.mds"


BOUND_S = 30.0  # far above what two attempts of half a second take, and below what an ordinary patience waits


def impatient(folder: Path) -> CacheOptions:
    return CacheOptions(folder, patience=RetryPolicy(timeout=0.5, retries=1))


def patient(folder: Path) -> CacheOptions:
    """Wait long for answers that come at once, as the machine may be busy."""
    return CacheOptions(folder, patience=RetryPolicy(timeout=60, retries=1))


@pytest.mark.parametrize("kind", ["refuse", "reset", "cut", "short", "flip", "dribble"])
def test_a_temporary_fault_is_survived(s3: FakeS3, tmp_path: Path, kind: str):
    form = "zstd" if kind in ("flip", "short") else "plain"
    s3.fail(kind, "shard.00001", times=1)
    cache = CacheOptions(tmp_path, patience=RetryPolicy(timeout=3 if kind == "dribble" else 60, retries=1))
    check_whole(opened(f"s3://bucket/{form}", cache), DOCUMENTS[:45])
    assert max(s3.downloads.values()) >= 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("refuse", "SlowDown"),
        ("reset", "Connection"),
        ("cut", "IncompleteRead"),
        ("short", "the received file has"),
        ("flip", "the received file differs from its digest"),
        ("lost", "not found"),
        ("dribble", "not finished after 1 s"),
        ("silent", "not finished after 1 s|Read timeout"),
    ],
)
def test_a_permanent_fault_is_an_error(s3: FakeS3, tmp_path: Path, kind: str, message: str):
    hasty = CacheOptions(tmp_path, patience=RetryPolicy(timeout=1, retries=1))
    store = opened("s3://bucket/plain", hasty if "after 1 s" in message else patient(tmp_path))
    document = int(store.shard_documents[0])
    s3.fail(kind, "web/.*shard.00001")
    begin = time.monotonic()
    with pytest.raises(DataError, match=message) as error:
        store.read(document, 0, 1)
    assert time.monotonic() - begin < 60
    assert f"s3://bucket/plain: shard {SHARD} " in str(error.value)
    assert f"(requested for document {document})" in str(error.value)
    store = opened("s3://bucket/plain", patient(tmp_path))
    assert np.array_equal(store.read(0, 0, len(DOCUMENTS[0])), DOCUMENTS[0])  # the others are read
    s3.faults.clear()
    check_whole(store, DOCUMENTS[:45])


@pytest.mark.parametrize("form", ["plain", "zstd"])
def test_a_damaged_file_of_the_cache_is_fetched_again(s3: FakeS3, tmp_path: Path, form: str):
    check_whole(opened(f"s3://bucket/{form}", quick(tmp_path)), DOCUMENTS[:45])
    file = next(tmp_path.glob(f"*/{SHARD}"))
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], flip(whole)):
        file.write_bytes(damaged)
        s3.downloads.clear()
        check_whole(opened(f"s3://bucket/{form}", quick(tmp_path)), DOCUMENTS[:45])
        assert [key for key in +s3.downloads if "shard" in key] == [f"{form}/{SHARD}{'.zstd' * (form == 'zstd')}"]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    write(tmp_path / "data")
    return tmp_path / "data"


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "is missing"),
        (lambda data: b"", "is empty"),
        (lambda data: data[:100], "has 100 of"),
        (lambda data: data + b"0", "bytes"),
        (flip, "differs from its digest in the manifest"),
    ],
)
def test_a_damaged_local_shard_is_refused_and_kept(
    local: Path, tmp_path: Path, damage: Callable[[bytes], bytes] | None, message: str
):
    store = opened(local, quick(tmp_path / "cache"))
    file = local / SHARD
    whole = file.read_bytes()
    if damage:
        file.write_bytes(damage(whole))
    else:
        file.unlink()
    document = int(store.shard_documents[0])
    with pytest.raises(DataError, match=message) as error:
        store.read(document, 0, 1)
    assert f"{local}: shard {SHARD} " in str(error.value)
    assert f"document {document}" in str(error.value)
    assert file.exists() == (damage is not None)  # what is read in place is not thrown away
    file.write_bytes(whole)
    check_whole(store, DOCUMENTS[:45])


def test_a_damaged_compressed_shard_is_refused(tmp_path: Path):
    write(tmp_path / "data", compression="zstd:3")
    cache = patient(tmp_path / "cache")
    store = opened(tmp_path / "data", cache)
    file = tmp_path / "data" / f"{SHARD}.zstd"
    whole = file.read_bytes()
    file.write_bytes(flip(whole))
    with pytest.raises(DataError, match=r"differs from its digest in index\.json"):
        check_whole(store, DOCUMENTS[:45])
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        check_whole(store, DOCUMENTS[:45])
    assert not list((tmp_path / "cache").glob(f"*/{SHARD}"))


def tamper(folder: Path, change: Callable[[dict], None], source: str = "train/web") -> TokenFolder:
    """Change a folder's index, with a manifest that has the changed index's digest."""
    index = folder / source / "index.json"
    values = json.loads(index.read_text())
    change(values["shards"][1])
    index.write_text(json.dumps(values))
    manifest = json.loads((folder / "manifest.json").read_text())
    split, name = source.split("/")
    manifest["splits"][split][name]["index"] = digest_of(index.read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": None}))
    return TokenFolder.open(folder)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("raw_data", "basename"), "../../../outside"),
        (("raw_data", "basename"), "/etc/passwd"),
        (("raw_data", "bytes"), 3),
        (("raw_data", "hashes"), {}),
        (("zip_data",), {"basename": "../x.zstd", "bytes": 1, "hashes": {"xxh3_128": "0"}}),
        (("column_names",), ["text"]),
        (("column_encodings",), ["pkl"]),
        (("samples",), 1),
    ],
)
def test_shards_are_read_by_the_manifest_and_not_by_the_index(
    local: Path, tmp_path: Path, keys: tuple[str, ...], value: object
):
    """The manifest says it. The index is for other readers."""

    def change(entry: dict) -> None:
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = value

    store = DocumentStore(tamper(local, change), "train", "web", quick(tmp_path / "cache"))
    check_whole(store, DOCUMENTS[:45])


@pytest.mark.parametrize("value", [{}, 3, {"hashes": {}}, {"hashes": 3}])
def test_an_index_without_digests_is_refused(local: Path, tmp_path: Path, value: object):
    folder = tamper(local, lambda entry: entry.update(zip_data=value))
    with raises_code(FolderError, "unreadable", "train/web/index.json"):
        DocumentStore(folder, "train", "web", quick(tmp_path / "cache"))


def test_a_changed_or_broken_index_is_refused(local: Path, tmp_path: Path):
    folder = TokenFolder.open(local)
    index = local / "train/web/index.json"
    for text in (index.read_text() + " ", "{", '{"version": 2, "shards": []}'):
        index.write_text(text)
        with raises_code(FolderError, "unreadable", "train/web/index.json"):
            DocumentStore(folder, "train", "web", quick(tmp_path / "cache"))


def test_a_compression_that_names_a_path_is_refused(tmp_path: Path):
    write(tmp_path / "data", compression="zstd:3")
    folder = TokenFolder.open(tmp_path / "data")
    text = folder.manifest.dumps().replace('"zstd:3"', '"/../../../zstd"')
    with raises_code(FolderError, "unreadable", "'/../../../zstd'"):
        DataManifest.parse(text, tmp_path)


@pytest.mark.parametrize("linked", [SHARD, "train/web/part-00000", "train/web", "train"])
@pytest.mark.parametrize("form", ["plain", "zstd"])
def test_symbolic_links_are_not_followed(tmp_path: Path, linked: str, form: str):
    write(tmp_path / "data", compression="zstd:3" if form == "zstd" else None)
    name = linked
    if form == "zstd" and linked == SHARD:
        name = f"{SHARD}.zstd"
    (tmp_path / "data" / name).rename(tmp_path / "outside")
    (tmp_path / "data" / name).symlink_to(tmp_path / "outside")
    cache = patient(tmp_path / "cache")
    with pytest.raises((DataError, FolderError), match=r"out of the folder"):
        check_whole(opened(tmp_path / "data", cache), DOCUMENTS[:45])


def test_a_link_in_the_cache_is_not_followed(s3: FakeS3, tmp_path: Path):
    store = opened("s3://bucket/plain", patient(tmp_path / "cache"))
    (tmp_path / "outside").mkdir()
    (store.folder.path / "train/web/part-00000").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="out of the folder"):
        store.read(0, 0, 1)
    assert not list((tmp_path / "outside").iterdir())


def test_tokens_beyond_the_vocabulary_are_refused(local: Path, tmp_path: Path):
    values = json.loads((local / "manifest.json").read_text())
    (local / "manifest.json").write_text(json.dumps(values | {"vocab_size": 300, "digest": None}))
    store = opened(local, quick(tmp_path / "cache"))
    number = next(n for n, document in enumerate(DOCUMENTS[:45]) if document.max() >= 300)
    with pytest.raises(DataError, match=rf"document {number} \(sample \d+ of the shard\) has the token \d+") as error:
        store.check(number, 0, len(DOCUMENTS[number]))
    assert "shard train/web/part-00000/shard.0000" in str(error.value)


def test_lengths_that_differ_from_the_samples_are_refused(local: Path, tmp_path: Path):
    file = local / "train/web/lengths.npy"
    lengths = np.load(file)
    lengths[[2, 3]] = lengths[[2, 3]] + np.array([1, -1], dtype=np.int64)
    np.save(file, lengths.astype(np.uint32))
    with raises_code(FolderError, "unreadable", "lengths.npy"):
        opened(local, quick(tmp_path / "cache"))
    values = json.loads((local / "manifest.json").read_text())
    values["splits"]["train"]["web"]["lengths"] = digest_of(file.read_bytes())
    (local / "manifest.json").write_text(json.dumps(values | {"digest": None}))
    with pytest.raises(DataError, match=r"the sizes of 2 samples do not fit .* the first is sample 2 \(document 2\)"):
        opened(local, quick(tmp_path / "cache")).read(0, 0, 1)


def test_a_replaced_dataset_is_not_mixed_with_the_old_one(s3: FakeS3, tmp_path: Path):
    shutil.copytree(s3.root / "plain", s3.root / "changing")
    old = opened("s3://bucket/changing", patient(tmp_path))
    old.read(0, 0, 1)
    digest = old.folder.digest
    shutil.rmtree(s3.root / "changing")
    others = make_documents(90, seed=7)
    write(s3.root / "changing", others)
    new = opened("s3://bucket/changing", patient(tmp_path))
    assert new.folder.digest != digest
    check_whole(new, others[:45])
    with pytest.raises(DataError, match="the received file"):  # the run that began with the old one does not mix them
        check_whole(old, DOCUMENTS[:45])
    shutil.rmtree(s3.root / "changing")


def test_an_unwritable_cache_is_named(s3: FakeS3, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises_code(FolderError, "unreadable", f"{tmp_path}/file/cache", "data.cache"):
        open_folder("s3://bucket/plain", patient(tmp_path / "file" / "cache"))
    store = opened(s3.root / "zstd", patient(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=rf"shard train/web.*{tmp_path}/file/cache can't be written"):
        store.read(0, 0, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_without_another_try(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    store = opened("s3://bucket/plain", quick(tmp_path))

    attempts = []

    def full(self: object, *arguments: object) -> str:
        attempts.append(arguments)
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(Bucket, "bring", full)
    with pytest.raises(DataError, match=r"no room for \d+ bytes .*data.cache.*data.cache_limit"):
        store.read(0, 0, 1)
    assert len(attempts) == 1  # it does not pass, so it is not tried again


def test_an_endpoint_that_does_not_answer_is_refused_in_time(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        cases = [(patient, "Could not connect"), (impatient, "not finished after 0.5 s|Read timeout")]
        for patience, message in cases:
            if patience is impatient:
                hole.listen(10)
            monkeypatch.setenv("S3_ENDPOINT_URL", url)
            begin = time.monotonic()
            with pytest.raises(FolderError, match=message) as error:
                open_folder("s3://bucket/plain", patience(tmp_path))
            assert str(error.value).startswith("s3://bucket/plain can't be opened: manifest.json can't be fetched")
            assert time.monotonic() - begin < BOUND_S


def test_a_store_lost_after_opening_is_reported(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = opened("s3://bucket/plain", impatient(tmp_path))
    s3.fail("silent", ".")
    with pytest.raises(DataError, match=r"s3://bucket/plain: shard .*(not finished after|Read timeout)"):
        store.read(0, 0, 1)


def test_urls_without_a_dataset_are_refused(s3: FakeS3, tmp_path: Path):
    cache = patient(tmp_path)
    with raises_code(FolderError, "unsupported", "ftp://", "s3://"):
        open_folder("ftp://host/data", cache)
    with raises_code(FolderError, "unreadable", "s3://bucket/nothing", "manifest.json"):
        open_folder("s3://bucket/nothing", cache)
    with raises_code(FolderError, "no-file", "nothing"):
        open_folder(str(tmp_path / "nothing"), cache)


@pytest.mark.parametrize("file", ["tokenizer.json", "train/web/index.json", "validation/web/lengths.npy"])
def test_files_beside_the_shards_are_compared_with_the_manifest(s3: FakeS3, tmp_path: Path, file: str):
    s3.fail("flip", file, times=1)
    cache = quick(tmp_path)
    open_folder("s3://bucket/plain", cache)
    next(tmp_path.glob(f"*/{file}")).write_bytes(b"damaged here")
    open_folder("s3://bucket/plain", cache)
    next(tmp_path.glob(f"*/{file}")).write_bytes(b"damaged here")
    s3.fail("flip", file)
    with raises_code(FolderError, "unreadable", file):
        open_folder("s3://bucket/plain", cache)


def test_a_missing_client_is_named(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with raises_code(FolderError, "unsupported", "boto3", "[s3]"):
        open_folder("s3://bucket/plain", quick(tmp_path))


def test_a_lock_that_is_never_released_is_reported(s3: FakeS3, tmp_path: Path):
    cache = CacheOptions(tmp_path, patience=RetryPolicy(timeout=0.2, retries=0))
    store = opened(s3.root / "zstd", cache)
    with (
        store._entry.lock(f"train/web/{store._shards[0].file}", 1),
        pytest.raises(DataError, match=r"another process has held .*shard.00000.mds for \d seconds"),
    ):
        store.read(0, 0, 1)
