"""An evaluation's records (samples.jsonl): a line with the measurement's conditions, then a line for each sample.

Lines are written in batches and flushed to disk. An evaluation that was killed continues after the last complete line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridtron.problems import Unusable
from hybridtron.train.records import read_lines, write_whole

Line = dict[str, Any]
EQUAL_VERSIONS = ("0.1.0", "0.2.0")
"""Versions of this package that measure the same numbers, so that one continues the records of the other."""


class Lines:
    """Lines by key, in memory. A line that is added again moves to the end."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.pop(line["key"], None)
            self.lines[line["key"]] = line


def recorded(file: Path, about: Mapping[str, Any]) -> list[Line]:
    """Read a file's lines if they were measured under the same conditions.

    Raises Unusable if samples were measured under other conditions. If the file has only instruments, they are dropped
    and measured again instead: that takes minutes, and nothing else is lost.
    """
    header, *lines = read_lines(file) or [{"about": about}]
    before = header.get("about", {})
    changed_keys = [key for key in {**before, **about} if not _same(key, before.get(key), about.get(key))]
    if not changed_keys:
        return lines
    if not any("metrics" in line or "nats" in line for line in lines):
        return []
    was = {key: before.get(key) for key in changed_keys}
    now = {key: about.get(key) for key in changed_keys}
    raise Unusable(
        f"{file} was measured with {was}, now with {now}: delete it, or use another --output", code="changed"
    )


def _same(key: str, before: Any, now: Any) -> bool:
    """Compare a condition's two values. Kernels may differ for unused ops, and versions if they measure the same."""
    if key == "hybridtron" and before in EQUAL_VERSIONS and now in EQUAL_VERSIONS:
        return True
    if key == "kernels" and before and now:
        return all(before.get(op) == form for op, form in now.items())
    return before == now


class Records(Lines):
    """A file's lines; only the process with `writes` appends to it."""

    def __init__(self, file: Path, about: Mapping[str, Any], writes: bool = True) -> None:
        super().__init__()
        self.file, self.about, self.writes = file, dict(about), writes
        lines = recorded(file, about)
        super().add(lines)
        if writes:
            text = "".join(json.dumps(line) + "\n" for line in ({"about": self.about}, *lines))
            write_whole(file, text)  # without an incomplete last line

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines, append them to the file and flush them to disk."""
        new = list(lines)
        super().add(new)
        if self.writes and new:
            with self.file.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))
                file.flush()
                os.fsync(file.fileno())
