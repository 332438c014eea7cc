"""Advice on errors of the cache's disk; errors of other folders stay as they are."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybridtron.storage.cache import CacheOptions, disk_advice
from hybridtron.storage.retry import StorageError


@pytest.mark.parametrize(("folder", "expected"), [("cache/train", StorageError), ("cache2/train", PermissionError)])
def test_error_of_a_folder_with_a_longer_name_gets_no_advice(
    folder: str, expected: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(expected), disk_advice(CacheOptions(tmp_path / "cache"), size=10):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / folder))
