"""What programs import sooner: megatron-core without torch.compile's compiler, wandb and TensorBoard; 1.9 s.

megatron-core compiles its fused functions when they are defined, which imports all of Inductor, and looks for loggers.
None of these functions is called here, so while megatron-core is imported `torch.compile` hands functions back as they
are, and the loggers are not found. After that all of this is as before. torch's optimizers would import the compiler to
be left out of what it compiles, and nothing compiles them here. Only programs ask for all this, not the package.

Nor does Python look for garbage among what a program's imports make, most of which stays: an eighth of their time.
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
    """From now on, for the first import of megatron-core."""
    if LOOKED_FOR not in sys.modules and not any(isinstance(each, LeanFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, LeanFinder())


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, where there was one before."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class LeanFinder(MetaPathFinder):
    """Finds megatron-core as Python would, and has its import watched over."""

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
    """Runs another loader while what is not used is out of sight."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self.loader  # as though this had not been here
        with out_of_sight():
            self.loader.exec_module(module)
        _uncompiled_optimizers()


@contextmanager
def out_of_sight() -> Iterator[None]:
    """Neither the hidden packages nor a compiler."""
    import torch

    compiler = torch.compile
    absent = [name for name in HIDDEN if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # pyrefly: ignore  # what importlib takes for "there is none"
    torch.compile = _as_it_is  # pyrefly: ignore
    try:
        yield
    finally:
        torch.compile = compiler
        for name in absent:
            sys.modules.pop(name, None)


def _uncompiled_optimizers() -> None:
    """Their functions without what imports the compiler at their first call."""
    import torch
    from torch.optim import Adam, Optimizer

    for name in OF_OPTIMIZERS:
        function: Any = getattr(Optimizer, name)
        setattr(Optimizer, name, getattr(function, "__wrapped__", function))
    step: Any = Adam.step
    Adam.step = torch.no_grad()(getattr(step, "__wrapped__", step))  # what is around it sets the same


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
