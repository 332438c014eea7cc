"""Rows of measurements as JSON lines: writing each to disk before the next measurement begins, and reading a folder.

A run of the queue appends to its own file, so that results are added to a folder and never overwritten. A row names its
part and its kind (`is`):

    begin       the code's digest, the card, commit and versions that all rows up to `end` belong to
    measured    a case, and its numbers
    failed      a case, and the reason
    end         `state`: done, failed or left out, and the reason of the last two
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
    """Append a row to a file; it is on disk when this returns, even if the process is killed afterwards."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Row]:
    """Read all rows of a folder's files, in the order of file names; incomplete lines are skipped."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def reason(error: BaseException) -> str:
    """Return the name and the beginning of an exception, short enough for a row."""
    return f"{type(error).__name__}: {error}"[:WHY_CHARACTERS]


@dataclass
class Recorder:
    """Writes a part's rows.

    `tiny`: sizes that run on any machine, with numbers that mean nothing. `modelled`: results of a rehearsal for the
    same kind of GPU, if available (`rehearse/queue_model.py`).
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
        """Yield a case's row, which the block fills. An exception is recorded as a failed row, and does not stop the
        next case.
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
    """One attempt at a part: its first row, its measurements, and its last row; None if it was interrupted."""

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
            return "cut short"
        return self.end.get("why", "")


def attempts(rows: list[Row]) -> list[PartAttempt]:
    """Group rows into attempts, in order; attempts of a rehearsal are left out."""
    grouped: list[PartAttempt] = []
    begin: Row | None = None
    between: list[Row] = []
    for row in [*rows, {"is": "begin", "part": ""}]:
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
