"""Makes torch accept a simulated CUDA device: loads a small library, compiled once for each installed torch.

The library's source is `fake_cuda_shim.cpp`.

The library must be loaded before torch is imported, so this module does not import torch. After loading, the process
can simulate (rehearse) training steps, but cannot compute on a real GPU.
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

SOURCE = Path(__file__).with_name("fake_cuda_shim.cpp")
FOLDER = "rehearse"  # folder in the user's cache for the compiled library


class ShimProblem(Exception):
    """Raised if no step can be rehearsed in this process. The message is the reason, in one line."""


@cache
def load() -> ctypes.CDLL:
    """Load the library, and compile it first if necessary. Call this function before torch is imported.

    Raises ShimProblem if torch is imported already, or if the library can't be compiled or loaded.
    """
    if "torch" in sys.modules:
        raise ShimProblem("torch is imported already: run the rehearsal in a new process")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides real GPUs
    torch_folder = _torch_folder()
    try:
        loaded = compiled.load(FOLDER, _name(torch_folder), partial(_compile, torch_folder), ctypes.RTLD_GLOBAL)
    except (compiled.NotBuilt, OSError) as error:
        raise ShimProblem(str(error)) from error
    return loaded.functions


def describe() -> tuple[bool, str]:
    """Return whether the library can be loaded or compiled, and its state as text. Nothing is compiled."""
    try:
        damage = compiled.state(FOLDER, _name(_torch_folder()))
    except (compiled.NotBuilt, ShimProblem) as error:
        return False, str(error)
    if damage is None:
        return True, "built for this torch"
    return True, f"built again by the next rehearsal: {damage}" if damage else "built by the first rehearsal"


def _name(torch_folder: Path) -> str:
    """Return the library's file name, with a digest of its source, torch's version and torch's folder."""
    text = SOURCE.read_text() + importlib.metadata.version("torch") + str(torch_folder)
    return f"fake-cuda-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.so"


def _torch_folder() -> Path:
    """Return torch's folder without importing torch. Raises ShimProblem if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ShimProblem("torch is not installed")
    return Path(spec.origin).parent


def _compile(torch_folder: Path, target: Path) -> None:
    """Compile the library with torch's headers, and write it to the file `target`."""
    include = torch_folder / "include"
    linked = torch_folder / "lib"
    options = [
        *("-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE)),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{linked}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{linked}"),
    ]
    compiled.run_compiler(compiled.compiler(), options, target)
