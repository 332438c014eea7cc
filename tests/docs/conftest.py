"""Pages of the docs, with their shell blocks and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.train.conftest import counting_folder as counting_folder  # the fixture

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "configs", "docs", "examples", "hybridtron", "slurm", "studies")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]


@dataclass(frozen=True)
class Command:
    """One command of a page, without `hybridtron`. `launcher` is the program that starts several processes, if any."""

    page: Path
    words: tuple[str, ...]
    launcher: str = ""

    def __str__(self) -> str:
        return " ".join((self.launcher, *self.words)).strip()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each line in the shell blocks, without comments; continued lines are joined."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def commands(page: Path) -> Iterator[Command]:
    """The uses of `hybridtron` on a page."""
    for words in command_lines(page):
        if words[0] == "hybridtron":
            yield Command(page, tuple(words[1:]))
        elif words[0] == "torchrun":
            yield Command(page, tuple(words[words.index("hybridtron") + 1 :]), "torchrun")
