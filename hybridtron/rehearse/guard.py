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
from functools import cache, partial
from pathlib import Path

from hybridtron import compiled

SOURCE = Path(__file__).with_name("guard.cpp")
FOLDER = "rehearse"  # of the user's cache


class GuardProblem(Exception):
    """Why nothing can be rehearsed here, in one line."""


@cache
def load() -> ctypes.CDLL:
    """The library, compiled where that has not been done; call before torch is imported."""
    if "torch" in sys.modules:
        raise GuardProblem("torch is imported already: a rehearsal needs a process of its own")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU stays as it is
    torch_folder = _torch_folder()
    try:
        loaded = compiled.load(FOLDER, _name(torch_folder), partial(_compile, torch_folder), ctypes.RTLD_GLOBAL)
    except (compiled.NotBuilt, OSError) as error:
        raise GuardProblem(str(error)) from error
    return loaded.functions


def described() -> tuple[bool, str]:
    """Check whether the library can be loaded or made, and describe its state; nothing is compiled."""
    try:
        damage = compiled.state(FOLDER, _name(_torch_folder()))
    except (compiled.NotBuilt, GuardProblem) as error:
        return False, str(error)
    if damage is None:
        return True, "built for this torch"
    return True, f"built again by the next rehearsal: {damage}" if damage else "built by the first rehearsal"


def _name(torch_folder: Path) -> str:
    """A file name of all that the library depends on."""
    text = SOURCE.read_text() + importlib.metadata.version("torch") + str(torch_folder)
    return f"guard-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.so"


def _torch_folder() -> Path:
    """Where torch is, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise GuardProblem("torch is not installed")
    return Path(found.origin).parent


def _compile(torch_folder: Path, target: Path) -> None:
    include = torch_folder / "include"
    linked = torch_folder / "lib"
    options = [
        *("-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE)),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{linked}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{linked}"),
    ]
    compiled.run_compiler(compiled.compiler(), options, target)
