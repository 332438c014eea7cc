"""Makes torch accept a simulated CUDA device, by a small library (`guard.cpp`) compiled once for each torch.

The library is loaded before torch is imported, so nothing here imports torch. Afterwards this process can rehearse, but
it cannot compute on a real GPU.
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
FOLDER = "rehearse"  # in the user's cache


class GuardProblem(Exception):
    """Raised when nothing can be rehearsed here; the message is the reason, on one line."""


@cache
def load() -> ctypes.CDLL:
    """Load the library, and compile it first if necessary. Call before torch is imported. Raises GuardProblem."""
    if "torch" in sys.modules:
        raise GuardProblem("torch is imported already: a rehearsal needs a process of its own")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU is left alone
    torch_folder = _torch_folder()
    try:
        loaded = compiled.load(FOLDER, _name(torch_folder), partial(_compile, torch_folder), ctypes.RTLD_GLOBAL)
    except (compiled.NotBuilt, OSError) as error:
        raise GuardProblem(str(error)) from error
    return loaded.functions


def described() -> tuple[bool, str]:
    """Check whether the library can be loaded or compiled, and describe its state. Nothing is compiled."""
    try:
        damage = compiled.state(FOLDER, _name(_torch_folder()))
    except (compiled.NotBuilt, GuardProblem) as error:
        return False, str(error)
    if damage is None:
        return True, "built for this torch"
    return True, f"built again by the next rehearsal: {damage}" if damage else "built by the first rehearsal"


def _name(torch_folder: Path) -> str:
    """Return the library's file name, with a digest of all its dependencies."""
    text = SOURCE.read_text() + importlib.metadata.version("torch") + str(torch_folder)
    return f"guard-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.so"


def _torch_folder() -> Path:
    """Find torch's folder without importing torch. Raises GuardProblem if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise GuardProblem("torch is not installed")
    return Path(spec.origin).parent


def _compile(torch_folder: Path, target: Path) -> None:
    """Compile the library against torch's headers into `target`."""
    include = torch_folder / "include"
    linked = torch_folder / "lib"
    options = [
        *("-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE)),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{linked}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{linked}"),
    ]
    compiled.run_compiler(compiled.compiler(), options, target)
