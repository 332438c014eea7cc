"""Where the folders are that belong to the package and stand beside it in a checkout: configs/ and benchmarks/.

A wheel has them inside the package, since nothing else of site-packages is ours.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """The folder of this name: the package's own, else the one beside it."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def pages() -> Path | None:
    """Where measured pages are written: the checkout's benchmarks/, or None where this is no checkout."""
    folder = shipped("benchmarks")
    return folder if folder.parent != PACKAGE and folder.is_dir() else None


BENCHMARKS = "benchmarks" if shipped("benchmarks").parent != PACKAGE else "hybridtron.benchmarks"
"""The package of what measures."""
