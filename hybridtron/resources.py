"""Paths of the folders that ship with the package, configs/ and benchmarks/, and the git repository of its checkout.

In a checkout, these folders are next to the package's folder. In a wheel they are inside the package's folder, because
in site-packages they could clash with other packages' folders.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Return the path of a shipped folder: inside the package's folder if it exists there, else next to that folder."""
    inside = PACKAGE / name
    if inside.is_dir():
        return inside
    return PACKAGE.parent / name


def pages() -> Path | None:
    """Return the folder for reports on measurements: benchmarks/ in a checkout, or None for an installed package."""
    folder = shipped("benchmarks")
    if folder.parent != PACKAGE and folder.is_dir():
        return folder
    return None


def git_output(*arguments: str) -> str | None:
    """Return git's output for this package's repository; None without a repository, or if git fails.

    If the package is installed in a folder of another repository, that repository is not used.
    """
    if not (PACKAGE.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.rstrip()
    return None


if shipped("benchmarks").parent != PACKAGE:
    BENCHMARKS = "benchmarks"
else:
    BENCHMARKS = "hybridtron.benchmarks"
"""Name of the Python package with the benchmarks."""
