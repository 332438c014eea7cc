"""Transformer Engine's linear layers, with or without FP8; they replace megatron-core's linear layers.

The package transformer_engine computes each rank's matrix products; `linear.py` adds the communication. The package
multiplies in FP8 inside an FP8 region (its context manager `autocast`). Every FP8 layer opens a region in `forward`. A
region around the model's forward pass would not suffice, because `parallel.recompute` runs layers again in backward.

Delayed scaling computes scales from amax histories: a tensor's largest absolute values in the last steps. The package
shifts all histories by one entry whenever an outermost region ends. The histories must be shifted once per step,
whatever the number of micro-batches. So delayed scaling needs an outer region, which stays open during the full step,
and in which the layers' regions are nested. A refused step (whose update is discarded) and an evaluation must not
change the statistics, so a copy is restored after them. Checkpoints store the statistics as `fp8_statistics.py` does,
so that a run can change between emulated FP8 and Transformer Engine.

A layer's amax in a step is the maximum over its micro-batches: the package only increases the stored maximum
(`atomicMaxFloat`), until the outermost region's end clears it. Output gradients are an exception: the package shifts
their histories in the backward pass of the first micro-batch. So the maxima of the step's other micro-batches count for
the next step.

Tests use a stub of the package, because the real package needs a GPU (`tests/test_gpu.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.device import fp8_device_fault, optional_package
from hybridtron.parallel.fp8 import CachedWeight, Fp8, Part, Role, ScalingStatistics

RECIPE_PACKAGE = "transformer_engine.common.recipe"
RECIPES = {
    Precision.fp8_delayed: "DelayedScaling",
    Precision.fp8_current: "Float8CurrentScaling",
    Precision.fp8_block: "Float8BlockScaling",
}
QUANTIZATION = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # second: before 2.9
# Keys of the package's statistics. FORWARD has columns for x (0) and W (1), and BACKWARD has a column for dy (0).
FORWARD = "scaling_fwd"
BACKWARD = "scaling_bwd"


class InFp8(CachedWeight):
    """Base class of layers that multiply in FP8. They can cache the weight that the first micro-batch has rounded."""

    is_first = True  # the next micro-batch is the first since the weight has changed

    def forget(self) -> None:
        self.is_first = True


def local_linear(in_features: int, out_features: int, fp8: Fp8 | None = None, accumulate: bool = False) -> nn.Module:
    """Build one rank's Transformer Engine linear layer, without a bias.

    With `accumulate` the layer adds its weight's gradient to Megatron's gradient buffer.
    """
    options = {"bias": False, "params_dtype": torch.get_default_dtype(), "fuse_wgrad_accumulation": accumulate}
    return _class(fp8)(in_features, out_features, **options)


def region(fp8: Fp8) -> AbstractContextManager[Any]:
    """Return the context manager in which the package's layers multiply in FP8.

    The context manager and its parameters have names that depend on the package's version.
    """
    package = _package()
    if hasattr(package, "autocast"):
        enter = package.autocast
        recipe = "recipe"
        group = "amax_reduction_group"
    else:
        enter = package.fp8_autocast
        recipe = "fp8_recipe"
        group = "fp8_group"
    parameters = inspect.signature(enter).parameters
    assert recipe in parameters, f"transformer_engine's {enter.__name__} takes {list(parameters)}"
    assert group in parameters, f"transformer_engine's {enter.__name__} takes {list(parameters)}"
    return enter(enabled=True, **{recipe: _recipe(fp8), group: fp8.group})


def fp8_fault(recipe: Precision) -> str | None:
    """Return the reason why this process can't multiply in FP8 with a recipe, or None if it can."""
    package = optional_package("transformer_engine.pytorch")
    recipes = optional_package(RECIPE_PACKAGE)
    if package.module is None or recipes.module is None:
        return f"transformer_engine is {package.reason if package.module is None else recipes.reason}"
    if not hasattr(recipes.module, RECIPES[recipe]):
        return f"the transformer_engine that is installed has no {RECIPES[recipe]}; 2.3 and newer have it"
    if (fault := fp8_device_fault()) is not None or recipe != Precision.fp8_block:
        return fault
    manager = next(module for name in QUANTIZATION if (module := optional_package(name).module) is not None)
    available, reason = manager.FP8GlobalStateManager.is_fp8_block_scaling_available()
    return None if available else reason


class TransformerEngineStatistics(ScalingStatistics):
    """Delayed scaling's statistics, which the package keeps in its layers; `fp8_statistics.py` defines their shapes.

    `step` opens the outer FP8 region.
    """

    def __init__(self, modules: Iterable[tuple[str, Any]], fp8: Fp8) -> None:
        self.fp8 = fp8
        self.layers: dict[str, Any] = {
            f"{name}.weight": module for name, module in modules if isinstance(module, InFp8)
        }
        # (weight's name, FORWARD or BACKWARD) -> copies of history and scale from before the current step
        self._before: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        self._before = self._copies()
        with region(self.fp8):
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        before = self._copies()
        yield
        self._put_back(before)

    def settle(self, accepted: bool) -> None:
        if not accepted:
            self._put_back(self._before)

    def parts(self) -> Iterator[Part]:
        for name, layer in self.layers.items():
            if FORWARD not in layer.fp8_meta:
                with region(self.fp8):
                    layer.init_fp8_metadata()
            # kind: key of the statistics; first: the role in column 0; count: the number of columns that are used
            for kind, first, count in ((FORWARD, Role.x, 2), (BACKWARD, Role.dy, 1)):
                statistics = layer.fp8_meta[kind]
                roles = len(Role)
                history_RH = statistics.amax_history[:, :count].T
                yield Part(f"fp8_history.{name}", (roles, history_RH.shape[1]), (first, 0), history_RH)
                yield Part(f"fp8_scale.{name}", (roles,), (first,), statistics.scale[:count])

    def _kept(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield the package's statistics, each after its key (weight's name, FORWARD or BACKWARD)."""
        for name, layer in self.layers.items():
            for kind in (FORWARD, BACKWARD):
                if kind in layer.fp8_meta:  # missing before the first forward pass
                    yield (name, kind), layer.fp8_meta[kind]

    def _copies(self) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        return {key: (statistics.amax_history.clone(), statistics.scale.clone()) for key, statistics in self._kept()}

    def _put_back(self, copies: dict[tuple[str, str], tuple[Tensor, Tensor]]) -> None:
        """Restore copied statistics. Statistics without a copy are reset to their initial values."""
        for key, statistics in self._kept():
            if key in copies:
                history, scale = copies[key]
                statistics.amax_history.copy_(history)
                statistics.scale.copy_(scale)
            else:
                statistics.amax_history.zero_()
                statistics.scale.fill_(1.0)


def _class(fp8: Fp8 | None) -> Any:
    """Return the package's class for linear layers, or for FP8 a subclass that opens an FP8 region in `forward`."""
    base: Any = _package().Linear
    if fp8 is None:
        return base

    class Linear(InFp8, base):
        def forward(self, x: Tensor) -> Tensor:
            tokens = x.numel() // x.shape[-1]
            if tokens % FP8_MULTIPLES[fp8.recipe] and not torch.is_grad_enabled():
                return super().forward(x)  # generation, with a number of tokens that FP8 can't multiply: use bf16
            with region(fp8):
                if not (fp8.cache_weights and torch.is_grad_enabled()):
                    return super().forward(x)
                is_first = self.is_first
                self.is_first = False
                return super().forward(x, is_first_microbatch=is_first)

    return Linear


def _package() -> Any:
    """Return the package's torch module. Raises RuntimeError with the reason if it is missing."""
    package = optional_package("transformer_engine.pytorch")
    if package.module is None:
        raise RuntimeError(f"transformer_engine is asked for, but it is {package.reason}")
    return package.module


@functools.cache
def _recipe(fp8: Fp8) -> Any:
    """Return the package's recipe object for these settings.

    Equal settings give the same object, because the package compares recipes by identity.
    """
    recipes = optional_package(RECIPE_PACKAGE)
    if recipes.module is None:
        raise RuntimeError(f"{RECIPE_PACKAGE} is asked for, but it is {recipes.reason}")
    if fp8.delayed:
        options = {"amax_history_len": fp8.history, "amax_compute_algo": "max"}
    else:
        options = {}
    return getattr(recipes.module, RECIPES[fp8.recipe])(**options)
