"""An evaluation's file samples.jsonl: a line with the measurement's conditions, then a line for each sample.

Lines are written in batches and flushed to disk. If an evaluation is killed, the next evaluation keeps all complete
lines, and measures only the samples without a line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridtron.problems import Unusable
from hybridtron.train.jsonl import read_lines, write_whole

Line = dict[str, Any]
EQUAL_VERSIONS = ("0.1.0", "0.2.0")
"""Versions of this package that measure alike. Each of them can continue a file that another of them has begun."""


class Lines:
    """Lines (dicts) by key, in memory. A line whose key exists already replaces the old line and moves to the end."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.pop(line["key"], None)
            self.lines[line["key"]] = line


def read_recorded(file: Path, about: Mapping[str, Any]) -> list[Line]:
    """Read the lines of samples.jsonl, if they were measured under the conditions `about`.

    Raises Unusable if the conditions differ and the file has lines for samples. If the conditions differ and the file
    has only lines for instruments, an empty list is returned: measuring the instruments again takes only minutes.
    """
    header, *lines = read_lines(file) or [{"about": about}]
    old = header.get("about", {})
    changed_keys = [key for key in {**old, **about} if not _is_equal(key, old.get(key), about.get(key))]
    if not changed_keys:
        return lines
    if not any("metrics" in line or "nats" in line for line in lines):
        return []
    was = {key: old.get(key) for key in changed_keys}
    now = {key: about.get(key) for key in changed_keys}
    raise Unusable(
        f"{file} was measured with {was}, but now the conditions are {now}: delete the file, or use another --output",
        code="changed",
    )


def _is_equal(key: str, old: Any, new: Any) -> bool:
    """Return True if the old and new values of a condition count as equal.

    Versions of this package count as equal if both are in EQUAL_VERSIONS. Kernels are compared only for ops that are
    used now.
    """
    if key == "hybridtron" and old in EQUAL_VERSIONS and new in EQUAL_VERSIONS:
        return True
    if key == "kernels" and old and new:
        return all(old.get(op) == kernel for op, kernel in new.items())
    return old == new


class SampleLog(Lines):
    """The lines of a samples.jsonl. If `writes` is False, lines are added in memory only.

    All processes of an evaluation have the lines; one process writes the file.
    """

    def __init__(self, file: Path, about: Mapping[str, Any], writes: bool = True) -> None:
        super().__init__()
        self.file, self.about, self.writes = file, dict(about), writes
        lines = read_recorded(file, about)
        super().add(lines)
        if writes:
            text = "".join(json.dumps(line) + "\n" for line in ({"about": self.about}, *lines))
            write_whole(file, text)  # written again, to remove an incomplete last line

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines; if `writes` is True, append them to the file and flush the file to disk."""
        new = list(lines)
        super().add(new)
        if self.writes and new:
            with self.file.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))
                file.flush()
                os.fsync(file.fileno())
