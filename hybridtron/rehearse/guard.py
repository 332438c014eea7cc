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
import sys
from functools import cache
from pathlib import Path

from hybridtron import compiled

SOURCE = Path(__file__).with_name("guard.cpp")


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
    try:
        path = compiled.cache_folder("rehearse") / name
        if not path.exists():
            compiled.build(path, lambda made: _compile(torch_folder, made))
    except (compiled.NotBuilt, OSError) as error:
        raise GuardProblem(str(error)) from error
    return path


def _torch_folder() -> Path:
    """Where torch is, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise GuardProblem("torch is not installed")
    return Path(found.origin).parent


def _compile(torch_folder: Path, target: Path) -> None:
    include, linked = torch_folder / "include", torch_folder / "lib"
    options = [
        *("-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE)),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{linked}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{linked}"),
    ]
    compiled.run_compiler(compiled.compiler(), options, target)
