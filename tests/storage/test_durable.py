"""A file that the disk takes while it is being written."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from hybridtron.storage.durable import FLUSH_BYTES, writing

PART = memoryview(bytes(FLUSH_BYTES // 2))


def test_large_writes_are_flushed_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = Event()
    sizes = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: (sizes.append(os.fstat(file).st_size), flushed.set()))
    with writing(tmp_path / "file") as write:
        write(PART)
        assert not sizes
        write(PART)
        assert flushed.wait(10)
        write(memoryview(b"end"))
    assert sizes == [FLUSH_BYTES, FLUSH_BYTES + 3], "and all of it at the end"
    assert (tmp_path / "file").read_bytes() == bytes(FLUSH_BYTES) + b"end"


def test_error_of_an_early_flush_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Event()

    def fsync(_: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the disk has failed")

    def write_some() -> None:
        with writing(tmp_path / "file") as write:
            write(PART)
            write(PART)
            assert failed.wait(10)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="the disk has failed"):
        write_some()
