"""Stubs for Transformer Engine: its linear layer, with and without FP8, and its scaling recipes.

A rehearsal simulates a training step without a GPU. In a rehearsal, the stubs compute nothing, and count the work that
Transformer Engine would do.

An FP8 region is the body of a `with autocast(...)` block. Inside it, both inputs to a matrix product are cast to FP8. A
cast reads its input once and writes two copies with one byte per element: a copy in the input's layout, and a
transposed copy. The transposed copy is saved for the backward pass, instead of the input. The backward pass casts the
output's gradient in the same way. If the caller passes `is_first_microbatch`, a weight is cast only in a step's first
micro-batch, and later micro-batches use the same copies. Else every forward pass casts the weight.
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

from hybridtron.rehearse import events
from hybridtron.rehearse.package_stubs import Given

REGIONS: list[Any] = []  # scaling recipes of the open autocast blocks, innermost last; None for a block without FP8
# number of scaled tensors in a pass; forward: input, weight and output; backward: gradients of output and input
COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}


@contextmanager
def autocast(arguments: Given) -> Iterator[None]:
    """Open an FP8 region. With `enabled=False`, linear layers inside do not use FP8.

    `arguments` are the arguments of Transformer Engine's `autocast`. In older versions, the argument `recipe` is named
    `fp8_recipe`.
    """
    REGIONS.append(arguments.get("recipe", arguments.get("fp8_recipe")) if arguments.get("enabled", True) else None)
    try:
        yield
    finally:
        REGIONS.pop()


class ScalingStub:
    """Base class for stubs of scaling recipes. A recipe chooses scale factors. A stub only stores its arguments."""

    real: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = self.real.bind(*args, **kwargs).arguments


class DelayedStub(ScalingStub):
    """Scaling for each tensor by its largest absolute values in earlier steps."""


class CurrentStub(ScalingStub):
    """Scaling for each tensor by its own largest absolute value."""


class BlockStub(ScalingStub):
    """Scaling by the largest absolute value in each block of a tensor."""


class GlobalStateStub:
    """Stub for the package's global state; it reports block scaling as available."""

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        return True, ""


class LinearStub(nn.Module):
    """Linear layer without a bias, y = x W^T.

    In an FP8 region, the layer counts casts and FP8 matrix products. Elsewhere it computes an ordinary matrix product.
    """

    real: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        options = self.real.bind(*args, **kwargs).arguments
        assert options.get("bias") is False, "the stub supports only layers without a bias: pass bias=False"
        shape = options["out_features"], options["in_features"]
        self.weight = nn.Parameter(torch.empty(shape, dtype=options.get("params_dtype"), device="cuda"))
        self.fp8_meta: dict[str, Any] = {}
        self.rounded: tuple[Tensor, Tensor] | None = None
        self.accumulates: bool = options.get("fuse_wgrad_accumulation", False)

    def init_fp8_metadata(self) -> None:
        """If the region's recipe is delayed scaling, allocate amax histories and scales.

        An amax is the largest absolute value of a tensor in one step.
        """
        recipe = REGIONS[-1]
        if isinstance(recipe, DelayedStub):
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
    """Autograd function for an FP8 linear layer, which counts casts and matrix products.

    With `accumulates`, the weight's gradient is added to the weight's `main_grad`.
    """

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
    """Count a cast of x to FP8, and return placeholders for its two copies: in x's layout, and transposed.

    Placeholders are uninitialized tensors with one byte per element. Both have x's shape.
    """
    layouts = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x, dtype=torch.uint8)
    events.report_kernel("cast to fp8", x.numel() * (x.element_size() + 2), 0, "torch")
    return layouts


def _product(left: Tensor, right: Tensor, out: Tensor, depth: int, read: Tensor | None = None) -> None:
    """Count the FLOPs and bytes of an FP8 matrix product, out = left @ right, with the inner dimension `depth`.

    The product reads `left` and `right`, and writes `out`. If the product is added to a tensor, pass this tensor as
    `read`, so that its bytes count too.
    """
    moved = left.numel() + right.numel() + out.nbytes + (0 if read is None else read.nbytes)
    events.report_kernel("fp8 mm", moved, 2 * out.numel() * depth, "product")
