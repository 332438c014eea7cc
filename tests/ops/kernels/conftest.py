"""Where there is no CUDA device, the kernels run in Triton's interpreter, which is numpy, for these tests alone.

What is `triton.jit` is decided when a file is read. So the kernels' files, and with them the functions of Triton's own
library that were read before by torch, are taken anew while a module of this folder runs, and put back after it.
Nothing of this folder is collected where Triton cannot be had, which is off Linux.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybridtron.device import compute_device
from hybridtron.ops import kernels

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    if compute_device().type == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (tl.standard, tl, tl.math):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, _interpreted(value))
        _forget_kernels()
        yield
        _forget_kernels()


_AGAIN: dict[Callable[..., object], object] = {}


def _interpreted(function: Any) -> object:
    """One for each function, as the interpreter tells `tl.sum`'s combination from others by identity."""
    from triton.runtime.interpreter import InterpretedFunction

    return _AGAIN.setdefault(function.fn, InterpretedFunction(function.fn))


def _forget_kernels() -> None:
    """The next import reads the kernels' files again."""
    for name in [name for name in sys.modules if name.startswith(f"{kernels.__name__}.")]:
        del sys.modules[name]
        if hasattr(kernels, leaf := name.rpartition(".")[2]):
            delattr(kernels, leaf)
    importlib.invalidate_caches()


@pytest.fixture
def device() -> torch.device:
    """CUDA where there is one, and then the kernels run compiled."""
    return compute_device()


@pytest.fixture(
    params=[
        "here",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")],
        ),
    ]
)
def everywhere() -> torch.device:
    """As `device`, for tests that are also among those of the marker `gpu`."""
    return compute_device()
