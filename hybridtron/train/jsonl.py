"""Reading and writing of JSON files in a run's folder.

The functions that read a file skip incomplete content: the process that wrote the file may have been killed while it
was writing. Importing this module does not import torch.
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
    """Read the complete lines of a JSON-lines file; return an empty list if the file is missing.

    With `tail`, only the lines in the file's last `tail` bytes are read.
    """
    records = []
    if path.exists():
        with path.open("rb") as file:
            file.seek(0 if tail is None else max(0, path.stat().st_size - tail))
            for line in file:
                if line.endswith(b"\n"):
                    with suppress(ValueError):  # with `tail`, the first line may be cut
                        records.append(json.loads(line))
    return records


def written_at(path: Path) -> int | None:
    """Return a file's modification time in ns; None if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically.

    Readers find either the old content or the new content, even if this process is killed while it writes.
    """
    temporary = temporary_of(path)
    temporary.write_text(text)
    temporary.rename(path)
