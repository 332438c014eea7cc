"""Faster start of programs: megatron-core is imported without torch.compile's compiler, wandb and TensorBoard (3.5 s).

megatron-core decorates its fused functions with torch.compile, which imports all of Inductor, and it imports loggers.
This package calls none of these functions. So while megatron-core is imported, `torch.compile` returns functions
unchanged, and the loggers can't be found; afterwards both are restored. torch's optimizers import the compiler in order
to disable it for their methods. Nothing compiles them here, so these methods are unwrapped for good. Only programs
install all this; importing the package does not.

Garbage collection is off during imports, whose objects mostly stay alive. That saves an eighth of their time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LOOKED_FOR = "megatron.core"
HIDDEN = ("wandb", "torch.utils.tensorboard")
OF_OPTIMIZERS = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")


def install() -> None:
    """Install the import hook for the first import of megatron-core. Does nothing if that is imported already."""
    if LOOKED_FOR not in sys.modules and not any(isinstance(finder, LeanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LeanFinder())


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off in the block; it is restored afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LeanFinder(MetaPathFinder):
    """Import hook that finds megatron-core as Python would, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LOOKED_FOR:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LeanLoader(spec.loader)
        return spec


class LeanLoader(Loader):
    """Runs another loader while the compiler and the loggers are hidden."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self.loader  # leave no trace of this loader
        with out_of_sight():
            self.loader.exec_module(module)
        _uncompiled_optimizers()


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Hide the optional loggers and torch.compile's compiler in the block."""
    import torch

    compiler = torch.compile
    absent = [name for name in HIDDEN if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # pyrefly: ignore  # importlib treats this as "not found"
    torch.compile = _as_it_is  # pyrefly: ignore
    try:
        yield
    finally:
        torch.compile = compiler
        for name in absent:
            sys.modules.pop(name, None)


def _uncompiled_optimizers() -> None:
    """Unwrap methods of torch's optimizers whose wrapper would import the compiler at the first call."""
    import torch
    from torch.optim import Adam, Optimizer

    for name in OF_OPTIMIZERS:
        function: Any = getattr(Optimizer, name)
        setattr(Optimizer, name, getattr(function, "__wrapped__", function))
    step: Any = Adam.step
    Adam.step = torch.no_grad()(getattr(step, "__wrapped__", step))  # the removed wrapper disables gradients too


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
