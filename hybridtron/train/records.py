"""Reading and writing of JSON files in a run's folder.

Readers skip incomplete content, since the writer may have been killed in the middle. Nothing here needs torch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridtron.storage.durable import temporary_of


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file; return an empty dictionary if it is missing or incomplete."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def read_lines(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file, or only those in its last `tail` bytes. A missing file has none."""
    records = []
    if path.exists():
        with path.open("rb") as file:
            file.seek(0 if tail is None else max(0, path.stat().st_size - tail))
            for line in file:
                if line.endswith(b"\n"):
                    with suppress(ValueError):  # with `tail`, the first line may be cut
                        records.append(json.loads(line))
    return records


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers, also after a kill, find either the old content or the new."""
    temporary = temporary_of(path)
    temporary.write_text(text)
    temporary.rename(path)
