"""Messages of the commands are those of the golden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.messages import FOLDER, renewed


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.txt")))
def test_messages_equal_the_golden_file(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text()
    assert renewed(text, tmp_path) == text, "python -m tests.golden.messages renews the file"
