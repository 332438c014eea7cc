"""Fixtures for kernels. Without a CUDA device, kernels run in Triton's interpreter (numpy), for these tests alone.

`triton.jit` decides when a file is imported. So the files of kernels, and the functions of Triton's own library that
torch has imported, are imported again while a module that uses `interpreter` runs, and once more after it. The tests of
kernels are not collected where Triton is unavailable, such as off Linux.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybridtron.device import compute_device

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*/test_kernels*.py", "test_sum_kernels.py", "test_whole_step.py"]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
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


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply bf16 in fp32, which is exact: it would multiply the integers that hold them."""
    if compute_device().type == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest) -> TensorHandle:
        if a.dtype.scalar == tl.bfloat16:
            a = self.cast_impl(a, tl.float32)
        if b.dtype.scalar == tl.bfloat16:
            b = self.cast_impl(b, tl.float32)
        return multiply(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


KERNELS = re.compile(r"hybridtron\.ops\.\w+\.kernels\w*|hybridtron\.ops\.(kernel_launch|gate_kernels|sum_kernels)")
_AGAIN: dict[Callable[..., object], object] = {}


def _interpreted(function: Any) -> object:
    """Cache one interpreted object per function: the interpreter recognizes `tl.sum`'s combination by identity."""
    from triton.runtime.interpreter import InterpretedFunction

    return _AGAIN.setdefault(function.fn, InterpretedFunction(function.fn))


def _forget_kernels() -> None:
    """The next import reads the kernels' files again."""
    for name in [name for name in sys.modules if KERNELS.fullmatch(name)]:
        del sys.modules[name]
        folder, _, leaf = name.rpartition(".")
        if hasattr(sys.modules.get(folder), leaf):
            delattr(sys.modules[folder], leaf)
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
    """Return the same device as `device`, for tests that also have the marker `gpu`."""
    return compute_device()
