"""C++ that is compiled where it first runs, and kept in the user's own cache. Nothing here imports torch.

A library is written to a temporary folder and renamed when it is complete, by each of several processes that begin at
once; the last one stays, and all are the same. So a caller must give it a name that says all that it depends on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
BUILD_S = 300.0  # longer than any compiler needs on a busy machine; one that hangs ends the attempt
ELSEWHERE = "(XDG_CACHE_HOME=FOLDER names another place)"


class NotBuilt(Exception):
    """There is no library; the message is the reason, on one line."""


def compiler() -> Path:
    """The user's choice, which alone is tried then, or one on the path. Raises NotBuilt."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if found := shutil.which(name):
            return Path(found).resolve()
    raise NotBuilt(f"CXX={chosen} is no program" if chosen else f"no C++ compiler ({', '.join(COMPILERS)}; CXX=...)")


def cache_folder(name: str) -> Path:
    """A folder of the user's own, made if need be. Raises NotBuilt or OSError."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise NotBuilt(f"no home directory for the cache {ELSEWHERE}") from None
    folder = base / "hybridtron" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None
    if folder.stat().st_uid != os.getuid():
        raise NotBuilt(f"{folder} belongs to another user {ELSEWHERE}")
    return folder


def build(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write a library to a temporary place, then give it its name. Raises NotBuilt."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as temporary:
            made = Path(temporary) / path.name
            make(made)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(path)
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


def run_compiler(program: Path, options: Sequence[str], target: Path) -> None:
    """Make one file. Raises NotBuilt with what the compiler said first of an error."""
    try:
        done = subprocess.run(
            [str(program), *options, "-o", str(target)], capture_output=True, text=True, errors="replace",
            timeout=BUILD_S, stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{program} does not end within {BUILD_S:.0f} s") from None
    if done.returncode != 0 or not target.is_file():
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "No space" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
        raise NotBuilt(f"{program} ends with {done.returncode}: {said}")
