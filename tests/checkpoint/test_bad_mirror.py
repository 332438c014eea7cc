"""A store that fails or lies: nothing counts as copied, and the next checkpoint is tried.

How the client itself ends, whatever a store does, is tested in tests/storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.checkpoint.folder import all_of
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.mirror import Mirror, download
from hybridtron.parallel.groups import Groups
from hybridtron.storage.retry import StorageError
from tests.checkpoint.conftest import Write, trained
from tests.slow import slow_except
from tests.storage.s3_server import FakeS3, point_at, serve

URL = "s3://bucket/runs/small"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with serve(tmp_path / "bucket") as running:
        point_at(running.url, monkeypatch)
        yield running


@pytest.mark.parametrize("fault", slow_except(["refuse", "cut", "short", "flip", "lost"], "refuse", "flip"))
def test_failed_copy_is_reported_and_the_next_checkpoint_is_tried(
    fault: str, alone: Groups, write: Write, tmp_path: Path, store: FakeS3, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = trained(alone)
    first = write(engine, 1)
    second = write(engine, 2)
    copy = Mirror(URL)
    store.fail(fault, "optimizer-00000")
    copy.offer(first)
    copy.finish()
    assert str(first) in capsys.readouterr().err
    assert copy.in_use() == set()
    assert not list((tmp_path / "bucket").rglob("manifest.json"))
    assert not list((tmp_path / "bucket").rglob("latest"))
    store.faults.clear()
    copy.offer(second)
    copy.finish()
    assert capsys.readouterr().err == ""
    store.fail(fault, "optimizer-00000")
    with pytest.raises((BrokenCheckpoint, StorageError)):
        download(URL, tmp_path / "back")
    assert not all_of(tmp_path / "back")
    store.faults.clear()
    assert download(URL, tmp_path / "back").name == second.name


def test_overlong_pointer_is_not_read(store: FakeS3, tmp_path: Path) -> None:
    endless = tmp_path / "bucket/runs/small/latest"
    endless.parent.mkdir(parents=True)
    endless.write_bytes(b"a" * 10**5)
    with pytest.raises(StorageError):
        download(URL, tmp_path / "back")
