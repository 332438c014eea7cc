"""Only regular files are read, and no more of them than they may hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridtron.safe_open import Unreadable, open_regular, read_regular

OTHERS = ["/dev/zero", "/dev/null", "pipe", "."]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("target", OTHERS)
def test_other_files_than_regular_ones_are_refused_before_they_are_read(target: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "link"
    link.symlink_to(target)
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(Unreadable):
            read(link)


def test_files_are_read_whole_up_to_their_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    link = tmp_path / "link"
    file.write_bytes(b"0123456789")
    link.symlink_to(file)
    assert read_regular(file, 10) == read_regular(link, 11) == b"0123456789"
    with pytest.raises(Unreadable):
        read_regular(file, 9)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 9)


def test_sparse_file_over_the_limit_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as stored:
        stored.truncate(2**40)
    with pytest.raises(Unreadable):
        read_regular(file, 2**20)


def test_read_file_is_closed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_regular(file, 100) == b"content"
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]
