"""Paths of the folders that ship with the package: configs/ and benchmarks/.

In a checkout they are next to the package. A wheel has them inside it, since site-packages belongs to all packages.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Return the path of a shipped folder: inside the package if it is there, else next to it."""
    inside = PACKAGE / name
    if inside.is_dir():
        return inside
    return PACKAGE.parent / name


def pages() -> Path | None:
    """Return the folder for pages of measurements: benchmarks/ of a checkout, or None without a checkout."""
    folder = shipped("benchmarks")
    if folder.parent != PACKAGE and folder.is_dir():
        return folder
    return None


if shipped("benchmarks").parent != PACKAGE:
    BENCHMARKS = "benchmarks"
else:
    BENCHMARKS = "hybridtron.benchmarks"
"""Name of the package with the benchmarks."""
