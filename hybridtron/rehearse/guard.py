"""Makes torch accept a CUDA device that is not there, by a small library (`guard.cpp`) compiled once for each torch.

It is loaded before torch is imported, so nothing here imports torch. From then on this process can rehearse and can
compute on no real GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILERS = ("c++", "g++", "clang++")


class GuardProblem(Exception):
    """Why nothing can be rehearsed here, in one line."""


@cache
def load() -> ctypes.CDLL:
    """The library, compiled where that has not been done; call before torch is imported."""
    if "torch" in sys.modules:
        raise GuardProblem("torch is imported already: a rehearsal needs a process of its own")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU stays as it is
    return ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)


def _library() -> Path:
    torch_folder = _torch_folder()
    text = SOURCE.read_text() + importlib.metadata.version("torch") + str(torch_folder)
    name = f"guard-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridtron"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(torch_folder, folder / name)
    return folder / name


def _torch_folder() -> Path:
    """Where torch is, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise GuardProblem("torch is not installed")
    return Path(found.origin).parent


def _compile(torch_folder: Path, library: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise GuardProblem(f"no C++ compiler was found ({', '.join(COMPILERS)}): install one, or set CXX to its path")
    include, linked = torch_folder / "include", torch_folder / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(compiler, "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(made)),
            *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
            *(f"-L{linked}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{linked}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GuardProblem(f"{compiler} could not compile {SOURCE}: {done.stderr.strip().splitlines()[:1]}")
        made.replace(library)
