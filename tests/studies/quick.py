"""Runs of a study at its quick size: the first writes results, and a second in other folders finds nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Main = Callable[[list[str]], int]


def written_quickly(main: Main, folder: Path, *options: str) -> dict[Path, int]:
    """Run a study in a folder: `runs`, `results`, and `out` for its page. Returns the times of its files of results."""
    assert main(["--quick", "--runs", str(folder / "runs"), *_where(folder), *options]) == 0
    return _times(folder)


def assert_nothing_is_left(main: Main, folder: Path, times: dict[Path, int], *options: str) -> None:
    """Run the study again from its results alone, which must stay as they are."""
    assert main(["--quick", "--runs", str(folder / "elsewhere"), *_where(folder), *options]) == 0
    assert _times(folder) == times


def _where(folder: Path) -> list[str]:
    return ["--output", str(folder / "out"), "--results", str(folder / "results")]


def _times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "results").iterdir()}
