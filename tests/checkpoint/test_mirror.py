"""Copies of checkpoints in a store that speaks S3: whole or reported, and brought back as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.checkpoint import mirror
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import all_of, newest
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.mirror import PATIENCE, Mirror, download, upload
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli.main import main
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import CheckpointConfig
from hybridtron.parallel.groups import Groups
from hybridtron.storage import s3
from hybridtron.storage.s3 import Bucket
from hybridtron.train import lock
from tests.checkpoint.conftest import Write, trained
from tests.slow import slow_except
from tests.storage.s3_server import FakeS3, point_at, serve

URL = "s3://bucket/runs/small"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with serve(tmp_path / "bucket") as running:
        point_at(running.url, monkeypatch)
        yield running


def same(left: Path, right: Path) -> bool:
    names = {path.name for path in left.iterdir()}
    return names == {path.name for path in right.iterdir()} and all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in names
    )


def test_mirror_holds_every_checkpoint_and_fetch_restores_it(
    alone: Groups,
    write: Write,
    tmp_path: Path,
    store: FakeS3,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = trained(alone)
    folder = write(engine, 1)
    engine.config.checkpoint = CheckpointConfig(mirror=URL, keep=1)
    saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
    for step in (2, 3):
        saver.save(engine, meta_of(engine, step, {}), tmp_path / "tokenizer.json")
        assert saver.mirror is not None
        saver.mirror.finish()
    assert [path.name for path in all_of(tmp_path)] == ["step-00000003"]
    assert "NOT MIRRORED" not in capsys.readouterr().err
    assert not folder.exists()
    assert main(["checkpoint", "fetch", URL, str(tmp_path / "back")]) == 0
    fetched = newest(tmp_path / "back")
    assert fetched is not None
    assert fetched.meta.step == 3
    assert not list(fetched.faults())
    assert same(fetched.folder, all_of(tmp_path)[0])
    assert main(["checkpoint", "fetch", f"{URL}/step-00000002", str(tmp_path / "back")]) == 0
    assert newest(tmp_path / "back") == fetched
    assert main(["checkpoint", "fetch", URL, str(tmp_path / "back")]) == 2
    assert main(["checkpoint", "fetch", "s3://bucket/nothing", str(tmp_path / "back")]) == 1
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    with lock.RunLock(tmp_path / "back"):  # as a run that is under way
        assert main(["checkpoint", "fetch", URL, str(tmp_path / "back")]) == 2


@pytest.mark.slow
def test_large_files_are_uploaded_in_parts(
    alone: Groups, write: Write, tmp_path: Path, store: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("a long list of tokens" * 10**6)
    folder = write(trained(alone))
    monkeypatch.setattr(s3, "BLOCK_BYTES", 1000)
    upload(Bucket(URL, PATIENCE), folder)
    assert same(download(URL, tmp_path / "back"), folder)
    assert store.uploads_in_parts == 1


@pytest.mark.parametrize("fault", ["spoil", "refuse"])
@pytest.mark.parametrize("name", slow_except(["model-00000", "config.yaml", "manifest.json"], "manifest.json"))
def test_incomplete_copy_is_reported_and_refused(
    fault: str,
    name: str,
    alone: Groups,
    write: Write,
    tmp_path: Path,
    store: FakeS3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write(trained(alone))
    store.fail(fault, name)
    copy = Mirror(URL)
    copy.offer(folder)
    copy.finish()
    assert f"{folder} to {URL}: " in capsys.readouterr().err
    store.faults.clear()
    with pytest.raises(BrokenCheckpoint) as refused:
        download(URL, tmp_path / "back")
    assert refused.value.code == "no-file"
    assert not all_of(tmp_path / "back")
    upload(Bucket(URL, PATIENCE), folder)  # the next try mends it
    assert same(download(URL, tmp_path / "back"), folder)


def test_damaged_copy_is_not_downloaded(alone: Groups, write: Write, tmp_path: Path, store: FakeS3) -> None:
    folder = write(trained(alone))
    upload(Bucket(URL, PATIENCE), folder)
    for kind in ("flip", "short"):
        store.fail(kind, "optimizer-00000", times=1)
        with pytest.raises(BrokenCheckpoint, match="optimizer-00000") as refused:
            download(URL, tmp_path / "back")
        assert refused.value.code == "unreadable"
        store.faults.clear()
    target = download(URL, tmp_path / "back")
    assert not list(Checkpoint.open(target).faults())
    with pytest.raises(FileExistsError):
        download(URL, tmp_path / "back")


class HeldAtTheEnd:
    """Lock for a mirror. It stops the first thread that is done, right after the thread has released the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: threading.Thread | None = None
        self.is_done = threading.Event()
        self.released = threading.Event()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.held is None and threading.current_thread().name == "mirror":
            self.held = threading.current_thread()
            self.is_done.set()
            assert self.released.wait(60)


def test_checkpoint_offered_at_the_end_of_the_thread_is_uploaded_once(
    store: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Mirror(URL)
    lock = HeldAtTheEnd()
    uploads = list[Path]()
    first = Path("step-00000001")
    second = Path("step-00000002")
    in_use_during_second = list[set[Path]]()

    def record(_: Bucket, folder: Path) -> None:
        uploads.append(folder)
        held = lock.held
        if held is not None and held is not threading.current_thread():
            lock.released.set()
            held.join(60)
            in_use_during_second.append(copy.in_use())

    monkeypatch.setattr(copy, "_lock", lock)
    monkeypatch.setattr(mirror, "upload", record)
    copy.offer(first)
    assert lock.is_done.wait(60)
    copy.offer(second)
    copy.finish()
    assert uploads == [first, second]
    assert in_use_during_second == [{second}]
    assert copy.in_use() == set()
