"""Only regular files are read, and no more of them than they may hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridtron.regular_files import Unreadable, open_regular, read_regular

OTHERS = ["/dev/zero", "/dev/null", "pipe", "."]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("target", OTHERS)
def test_what_is_no_regular_file_is_refused_before_it_is_read(target: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "link"
    link.symlink_to(target)
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(Unreadable):
            read(link)


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    link = tmp_path / "link"
    file.write_bytes(b"0123456789")
    link.symlink_to(file)
    assert read_regular(file, 10) == read_regular(link, 11) == b"0123456789"
    with pytest.raises(Unreadable):
        read_regular(file, 9)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 9)


def test_a_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as stored:
        stored.truncate(2**40)
    with pytest.raises(Unreadable):
        read_regular(file, 2**20)
