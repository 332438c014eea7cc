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
    """Lines by their keys."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def add(self, lines: Iterable[Line]) -> None:
        self.lines |= {line["key"]: line for line in lines}


class Records(Lines):
    """The lines of a file; with `writes` it is this process that adds to the file."""

    def __init__(self, file: Path, about: Mapping[str, Any], writes: bool = True) -> None:
        self.file, self.about, self.writes = file, dict(about), writes
        first, *lines = read_lines(file) or [{"about": self.about}]
        if other := [key for key, value in self.about.items() if first.get("about", {}).get(key) != value]:
            was = {key: first.get("about", {}).get(key) for key in other}
            now = {key: self.about[key] for key in other}
            raise Unusable(f"{file} was measured with {was}, now with {now}: delete it, or use another --output")
        self.lines = {line["key"]: line for line in lines}
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
