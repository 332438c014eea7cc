"""samples.jsonl: a line of what it was measured with, then a line a sample, in order, each with its key.

A batch of lines is written at once and reaches the disk; what a killed process left is continued where it ends.
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


class Lines:
    """Lines by their keys, the newest last."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.pop(line["key"], None)
            self.lines[line["key"]] = line


def recorded(file: Path, about: Mapping[str, Any]) -> list[Line]:
    """The lines of a file that were measured with this. Unusable where its samples were measured with something else.

    Instruments alone are measured again instead, as they take minutes, and nothing else is lost.
    """
    first, *lines = read_lines(file) or [{"about": about}]
    before = first.get("about", {})
    other = [key for key in {**before, **about} if not _same(key, before.get(key), about.get(key))]
    if not other:
        return lines
    if not any("metrics" in line or "nats" in line for line in lines):
        return []
    was = {key: before.get(key) for key in other}
    now = {key: about.get(key) for key in other}
    raise Unusable(f"{file} was measured with {was}, now with {now}: delete it, or use another --output")


def _same(key: str, before: Any, now: Any) -> bool:
    """Compare two values of a key; of kernels, only those of ops that are used now."""
    if key == "kernels" and before and now:
        return all(before.get(op) == form for op, form in now.items())
    return before == now


class Records(Lines):
    """The lines of a file; with `writes` it is this process that adds to the file."""

    def __init__(self, file: Path, about: Mapping[str, Any], writes: bool = True) -> None:
        super().__init__()
        self.file, self.about, self.writes = file, dict(about), writes
        lines = recorded(file, about)
        super().add(lines)
        if writes:
            text = "".join(json.dumps(line) + "\n" for line in ({"about": self.about}, *lines))
            write_whole(file, text)  # without a line that was cut short

    def add(self, lines: Iterable[Line]) -> None:
        new = list(lines)
        super().add(new)
        if self.writes and new:
            with self.file.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in new))
                file.flush()
                os.fsync(file.fileno())
