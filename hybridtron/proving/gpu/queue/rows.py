"""Rows of measurements as JSON lines: each is on disk before the next measurement begins, and a folder of them is read.

A run of the queue appends to one file of its own, so that results are added to a folder and never overwritten. A row
names its part and what it `is`:

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
    """Add a row to a file; it is on disk when this returns, whatever becomes of the process."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Row]:
    """All rows of a folder's files, by the files' names; a last line that is cut short is left out."""
    found: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def reason(error: BaseException) -> str:
    """Name and first lines of an exception, short enough for a row."""
    return f"{type(error).__name__}: {error}"[:WHY_CHARACTERS]


@dataclass
class Recorder:
    """Writes a part's rows.

    tiny: sizes with which any machine runs every line; their numbers say nothing. modelled: what a rehearsal on the
    same kind of GPU says of the part, where that is at hand (`rehearse/queue_model.py`).
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
        """Measure a case: the block fills its row. An exception becomes a failed row, and the next case is measured."""
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
    """One attempt at a part: its first row, its measurements, and its last row; no last row where all was cut short."""

    begin: Row
    rows: list[Row]
    end: Row | None

    @property
    def part(self) -> str:
        return self.begin["part"]

    @property
    def state(self) -> str:
        return FAILED if self.end is None else self.end["state"]

    @property
    def why(self) -> str:
        return "cut short" if self.end is None else self.end.get("why", "")


def attempts(rows: list[Row]) -> list[PartAttempt]:
    """Rows as attempts, in order; those of a rehearsal are no results."""
    found: list[PartAttempt] = []
    begin: Row | None = None
    between: list[Row] = []
    for row in [*rows, {"is": "begin", "part": ""}]:
        if row["is"] == "begin":
            if begin is not None:
                found.append(PartAttempt(begin, between, None))
            begin = row
            between = []
        elif row["is"] != "end":
            between.append(row)
        elif begin is not None:
            found.append(PartAttempt(begin, between, row))
            begin = None
    return [attempt for attempt in found if not attempt.begin.get("rehearsed")]
