"""Stand-ins for Transformer Engine: its linear layer, with and without FP8, and its scaling recipes.

In an FP8 region each input of a product is cast to FP8 twice, as it is and transposed (read once, one byte per value
for each). The transposed copy is saved for the backward pass instead of the input. The backward pass casts the gradient
in the same way. A weight that was cast in the first micro-batch is reused, in both layouts, by later micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridtron.rehearse import heard
from hybridtron.rehearse.stand_ins import Given

REGIONS: list[Any] = []  # recipes of the open regions; None where FP8 is disabled
COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}  # input, weight, output; gradients of output and input


@contextmanager
def autocast(given: Given) -> Iterator[None]:
    """Open an FP8 region. Older versions call the argument `recipe` fp8_recipe."""
    REGIONS.append(given.get("recipe", given.get("fp8_recipe")) if given.get("enabled", True) else None)
    try:
        yield
    finally:
        REGIONS.pop()


class ScalingStandIn:
    """Base class for scaling recipes, which stores its options."""

    real: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = self.real.bind(*args, **kwargs).arguments


class DelayedStandIn(ScalingStandIn):
    """Scaling by the largest values in earlier steps."""


class CurrentStandIn(ScalingStandIn):
    """Scaling by the tensor's own largest value."""


class BlockStandIn(ScalingStandIn):
    """Scaling by each block's largest value."""


class GlobalStateStandIn:
    """Stand-in for the package's global state; it reports block scaling as available."""

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        return True, ""


class LinearStandIn(nn.Module):
    """Linear layer without a bias, y = x W^T. In an FP8 region its casts and FP8 products are counted."""

    real: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        options = self.real.bind(*args, **kwargs).arguments
        assert options.get("bias") is False, "layers here have no bias"
        shape = options["out_features"], options["in_features"]
        self.weight = nn.Parameter(torch.empty(shape, dtype=options.get("params_dtype"), device="cuda"))
        self.fp8_meta: dict[str, Any] = {}
        self.rounded: tuple[Tensor, Tensor] | None = None
        self.accumulates: bool = options.get("fuse_wgrad_accumulation", False)

    def init_fp8_metadata(self) -> None:
        """Allocate amax histories and scales if the region's recipe is delayed scaling."""
        recipe = REGIONS[-1]
        if isinstance(recipe, DelayedStandIn):
            length = recipe.given.get("amax_history_len", 1024)
            for kind, columns in COLUMNS.items():
                scaling = SimpleNamespace(
                    amax_history=torch.zeros(length, columns, device="cuda"), scale=torch.ones(columns, device="cuda")
                )
                self.fp8_meta.setdefault(kind, scaling)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if not REGIONS or REGIONS[-1] is None:
            return x @ self.weight.T
        self.init_fp8_metadata()
        if is_first_microbatch is None:
            return _Fp8Product.apply(x, self.weight, _cast(self.weight.detach()), self.accumulates)
        if is_first_microbatch or self.rounded is None:
            self.rounded = _cast(self.weight.detach())
        return _Fp8Product.apply(x, self.weight, self.rounded, self.accumulates)


class _Fp8Product(torch.autograd.Function):
    """Autograd function with an FP8 linear layer's casts and products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: tuple[Tensor, Tensor], accumulates: bool) -> Tensor:
        (plain_x, x8) = _cast(x)
        (plain_weight, weight8) = rounded
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        ctx.save_for_backward(x8, weight8)
        ctx.types = (x.dtype, weight.dtype)
        ctx.accumulated = weight if accumulates else None
        _product(plain_x, plain_weight, y, weight.shape[1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8, weight8 = ctx.saved_tensors
        plain, transposed = _cast(grad)
        grad_x = torch.empty_like(x8, dtype=ctx.types[0])
        grad_weight = torch.empty_like(weight8, dtype=ctx.types[1])
        _product(plain, weight8, grad_x, weight8.shape[0])
        depth = x8.numel() // x8.shape[-1]
        if ctx.accumulated is None:
            _product(transposed, x8, grad_weight, depth)
        else:
            total = ctx.accumulated.main_grad
            _product(transposed, x8, total, depth, total)
            ctx.accumulated.grad_added_to_main_grad = True
        return grad_x, grad_weight, None, None


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Count a cast to FP8. Returns x as it is and transposed; both results have the shape of x here."""
    layouts = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x, dtype=torch.uint8)
    heard.runs("cast to fp8", x.numel() * (x.element_size() + 2), 0, "torch")
    return layouts


def _product(left: Tensor, right: Tensor, made: Tensor, depth: int, read: Tensor | None = None) -> None:
    """Count an FP8 product over an inner dimension of `depth`. It writes `made`, and reads `read` to accumulate."""
    moved = left.numel() + right.numel() + made.nbytes + (0 if read is None else read.nbytes)
    heard.runs("fp8 mm", moved, 2 * made.numel() * depth, "product")
