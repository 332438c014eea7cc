"""Reading what a run leaves in its folder, whose writer may have been killed in the middle, and writing. No torch."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridtron.storage.durable import temporary_of


def read_record(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none, or none that is whole."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def read_lines(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """The whole lines of a file, or those in its last bytes."""
    found = []
    if path.exists():
        with path.open("rb") as file:
            file.seek(0 if tail is None else max(0, path.stat().st_size - tail))
            for line in file:
                if line.endswith(b"\n"):
                    with suppress(ValueError):  # the first of the last bytes may begin in the middle
                        found.append(json.loads(line))
    return found


def write_whole(path: Path, text: str) -> None:
    """A kill, or a reader, finds what was there before or all of this."""
    temporary = temporary_of(path)
    temporary.write_text(text)
    temporary.rename(path)
