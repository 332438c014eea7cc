"""Faster start of programs, by 3.5 s: megatron-core is imported without torch's compiler, wandb and TensorBoard.

Three changes save time:

- While megatron-core is imported, `torch.compile` returns functions unchanged, and imports of wandb and TensorBoard
  fail. megatron-core decorates its fused functions with torch.compile, which would import Inductor, torch's compiler.
  This package uses neither the fused functions nor megatron-core's loggers. After the import, torch.compile and the
  loggers work as usual.
- The wrapper around methods in torch's optimizers is removed for the rest of the process. The wrapper excludes these
  methods from compilation, and imports the compiler to do so. This package never compiles optimizers.
- Garbage collection is off during imports, since nearly all imported objects stay alive. This saves an eighth of the
  import time.

Programs such as `hybridtron` install these changes; importing the package does not.
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
    """Install the import hook for megatron-core. Does nothing if the hook is installed or megatron-core is imported."""
    if LOOKED_FOR not in sys.modules and not any(isinstance(finder, FastStartFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FastStartFinder())


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off in the block, and restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FastStartFinder(MetaPathFinder):
    """Import hook that finds megatron-core in the usual way, and wraps its loader in a LeanLoader."""

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
            spec.loader = module.__loader__ = self.loader  # the module records only its usual loader
        with out_of_sight():
            self.loader.exec_module(module)
        _uncompiled_optimizers()


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Hide loggers and compiler in the block: loggers can't be imported, torch.compile returns functions unchanged."""
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
    """Remove the wrappers around torch's optimizer methods. They would import the compiler at the first call."""
    import torch
    from torch.optim import Adam, Optimizer

    for name in OF_OPTIMIZERS:
        function: Any = getattr(Optimizer, name)
        setattr(Optimizer, name, getattr(function, "__wrapped__", function))
    step: Any = Adam.step
    Adam.step = torch.no_grad()(
        getattr(step, "__wrapped__", step)
    )  # Adam.step's removed wrappers also disabled gradients


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
