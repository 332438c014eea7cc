"""Rows with measurements as JSON lines; each row is written before the next measurement begins.

A part is a group of measurements, and each measurement is a case. Every run writes its rows to a new file in a folder,
so that no results are overwritten. A row is a JSON object with the part's name, and with the kind of row in `is`:

    begin       first row of an attempt at a part: the code's digest, card (kind of GPU), commit and versions
    measured    a case with its numbers
    failed      a case with the reason why it failed
    end         last row of an attempt: `state` is done, failed or left out; unless it is done, `why` has the reason
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DONE = "done"
FAILED = "failed"
LEFT_OUT = "left out"
WHY_CHARACTERS = 400


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a file, and wait until the row is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Row]:
    """Return all rows in a folder's files, sorted by file name; incomplete lines are skipped."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def reason(error: BaseException) -> str:
    """Return an exception's name and the beginning of its message, short enough for a row."""
    return f"{type(error).__name__}: {error}"[:WHY_CHARACTERS]


@dataclass
class Recorder:
    """Writes one part's rows to a file.

    path      the file
    part      the part's name
    tiny      the part uses tiny sizes, which run on any machine; its numbers mean nothing
    modelled  modelled times for this kind of GPU from `rehearse/queue_model.py`, empty if not available
    failures  names of failed cases
    """

    path: Path
    part: str
    tiny: bool = False
    modelled: Mapping[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def write(self, case: str, kind: str, values: Mapping[str, Any]) -> None:
        append(self.path, {"part": self.part, "is": kind, "case": case, **values})

    @contextmanager
    def case(self, name: str) -> Iterator[Row]:
        """Yield an empty row for the block to fill, and write the row when the block ends.

        An exception in the block is not raised. The case is written as failed, and the next case can run.
        """
        row: Row = {}
        try:
            yield row
        except Exception as error:
            traceback.print_exc()
            self.failures.append(name)
            self.write(name, FAILED, {**row, "why": reason(error)})
        else:
            self.write(name, "measured", row)


@dataclass(frozen=True)
class PartAttempt:
    """One attempt at a part: its first row, the rows with its measurements, and its last row.

    The last row is None if the attempt was interrupted.
    """

    begin: Row
    rows: list[Row]
    end: Row | None

    @property
    def part(self) -> str:
        return self.begin["part"]

    @property
    def state(self) -> str:
        if self.end is None:
            return FAILED
        return self.end["state"]

    @property
    def why(self) -> str:
        if self.end is None:
            return "interrupted"
        return self.end.get("why", "")


def attempts(rows: list[Row]) -> list[PartAttempt]:
    """Group rows into attempts, and return the attempts in order. Attempts with tiny sizes are left out."""
    grouped: list[PartAttempt] = []
    begin: Row | None = None
    between: list[Row] = []
    for row in [*rows, {"is": "begin", "part": ""}]:  # the additional row ends the last attempt
        if row["is"] == "begin":
            if begin is not None:
                grouped.append(PartAttempt(begin, between, None))
            begin = row
            between = []
        elif row["is"] != "end":
            between.append(row)
        elif begin is not None:
            grouped.append(PartAttempt(begin, between, row))
            begin = None
    return [attempt for attempt in grouped if not attempt.begin.get("rehearsed")]
