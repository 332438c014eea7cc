"""The glossary's list of words that are not used is kept: in names, comments, docstrings, messages and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = (
    ".ci",
    ".github",
    "benchmarks",
    "configs",
    "docs",
    "examples",
    "hybridtron",
    "slurm",
    "studies",
    "tests",
    "tools",
)
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", "")  # without a suffix: Makefile, Dockerfile, .ci/run
KEPT = {  # former names that still work, a method of Python's files, words of bAbI, and the files that use them
    "went back": (
        "hybridtron/tasks/babilong/prompts.py",
        "hybridtron/tasks/babilong/world.py",
        "tests/tasks/solvers.py",
    ),
    "put down": ("hybridtron/tasks/babilong/world.py", "tests/tasks/solvers.py"),
    "aside": ("hybridtron/data/prepare/prepare_folder.py",),
    "tell": ("hybridtron/data/prepare/inputs.py",),
    "of_weights": ("docs/history.md", "hybridtron/config/load.py", "tests/config/test_load.py"),
}


def phrases() -> list[str]:
    """The left column of the glossary's list."""
    section = GLOSSARY.read_text().split("## Do not use")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)
    return [phrase for row in rows[1:] for phrase in row.split(", ")]


def pattern(words: list[str]) -> re.Pattern[str]:
    """Finds each phrase as complete words, also in a name and across a line break of a comment."""
    separated = (r"[\s_#]+".join(phrase.split()) for phrase in words)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(separated)})(?![^\W_])", re.IGNORECASE)


def uses_in(text: str) -> Iterator[tuple[int, str]]:
    """Line number and phrase of each use. `GoBack` is read as `Go Back`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    for match in pattern(phrases()).finditer(spaced):
        yield spaced.count("\n", 0, match.start()) + 1, match.group()


def written_files() -> Iterator[Path]:
    tops = [path for path in ROOT.iterdir() if path.is_file() and path.name not in (".git", "LICENSE")]
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    yield from (
        path
        for path in (*tops, *inside)
        if path.suffix in SUFFIXES and path.is_file() and path not in (GLOSSARY, Path(__file__))
    )


def test_files_do_not_use_the_banned_words() -> None:
    uses = []
    for path in written_files():
        where = path.relative_to(ROOT).as_posix()
        uses += [f"{where}: {phrase}" for _, phrase in uses_in(where)]
        in_text = (use for use in uses_in(path.read_text()) if where not in KEPT.get(use[1], ()))
        uses += [f"{where}:{line}: {phrase}" for line, phrase in in_text]
    assert uses == []


def test_list_of_the_glossary_is_read() -> None:
    assert {"told", "aside", "go back", "so many"} <= set(phrases())


@pytest.mark.parametrize(
    "text", ["as told.", "go_back.py", "class GoBack:", "it goes\n    # on here", "Put down", "x_told"]
)
def test_uses_of_banned_words_are_noticed(text: str) -> None:
    assert list(uses_in(text))


@pytest.mark.parametrize("text", ["a method", "metrics", "so that many", "metres", "retold", "loudness"])
def test_other_words_are_accepted(text: str) -> None:
    assert [phrase for _, phrase in uses_in(text)] == []
