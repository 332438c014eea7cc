"""Messages about refusals by the operating system name the file, the reason and a remedy."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybridtron.file_errors import in_words, is_of_the_user, room_left


def test_full_disk_is_reported_with_the_missing_and_the_free_space(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    said = in_words(error, tmp_path / "not" / "there")
    assert said.startswith(f"{tmp_path}/not/there: No space left on device; ")
    assert room_left(error, tmp_path, 5 * 10**6).startswith("; 5.0 MB are needed, and ")
    assert str(tmp_path) in said
    assert is_of_the_user(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG])
def test_errors_of_the_user_have_a_cure(number: int) -> None:
    error = OSError(number, "refused", "/a/b")
    assert in_words(error).startswith("/a/b: refused; ")
    assert is_of_the_user(error)
    assert room_left(error, Path("/")) == ""


def test_other_errors_are_reported_unchanged() -> None:
    error = OSError(errno.EIO, "Input/output error")
    assert in_words(error) == "[Errno 5] Input/output error"
    assert not is_of_the_user(error)
    assert in_words(OSError("no words")) == "no words"
