"""Emulated FP8 linear layers for any device: tensors are rounded to FP8, then multiplied in fp32.

    y = q(x) q(W)^T        dx = q(dy) q(W)        dW = q(dy)^T q(x)            q(t) = round(clamp(t s)) / s

x is the input, W is the weight, and y is the output. dx, dW and dy are gradients. t stands for x, W or dy. `round` goes
to the nearest value in an eight-bit format, whose largest value is F: e4m3 (F = 448) for x and W, e5m2 (F = 57344) for
dy. `clamp` limits values, infinities included, to the range from -F to F; nan stays nan. The scale s maps the largest
|t| to F. Transformer Engine 2.x has the same rules and defaults:

    fp8_delayed   s = F / largest |t| in the last H steps (the history, `fp8_statistics.py`). s is fixed within a step,
                  and 1 until the first step has ended.
    fp8_current   s = F / largest |t| in this tensor. If the tensor is sharded over tensor-parallel ranks, each rank
                  computes s from its shard.
    fp8_block     Each tile has its own s, rounded down to a power of two. W has tiles with 128 x 128 elements. A
                  tile in x or dy has 128 elements along the axis over which the matrix product sums. x and dy are
                  each used in two matrix products that sum over different axes, so they are rounded twice, once for
                  each product. The format is always e4m3.

s is 1 if the largest |t| is zero or infinite. Matrix products are summed in fp32. y and dx are rounded to x's dtype,
and dW is rounded to W's dtype. A GPU's tensor core sums in another order, so its results may differ slightly. Rounded
tensors are saved for the backward pass with one byte per element. The emulation is slow, and uses no FP8 hardware.

Legend: T tokens in all rows (sequences), I input features, O output features, H steps in a history. An axis 3 has
the roles x, W and dy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridtron.config.choices import Precision

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
TILE = 128


class Role(IntEnum):
    """Role of a rounded tensor in a linear layer. A role's value is its index in the statistics."""

    x = 0
    weight = 1
    dy = 2


FORMATS = {Role.x: E4M3, Role.weight: E4M3, Role.dy: E5M2}


@dataclass(frozen=True)
class Fp8:
    """Settings for linear layers in FP8."""

    recipe: Precision  # the scaling recipe
    layers: range  # sub-layers with FP8, by index; the linear layers in other sub-layers stay in bf16
    history: int = 1024  # steps over which delayed scaling takes the maximum
    emulate: bool = True  # False: Transformer Engine computes
    cache_weights: bool = False  # keep rounded weights until `CachedWeight.forget` is called
    group: ProcessGroup | None = None  # ranks over which delayed scaling all-reduces its maxima; None for one rank

    @property
    def delayed(self) -> bool:
        return self.recipe == Precision.fp8_delayed


class Rounded(NamedTuple):
    """An FP8 tensor, and its inverse scale 1 / s; `inverse` has one element, or one for each tile."""

    values: Tensor
    inverse: Tensor

    def floats(self) -> Tensor:
        """Return values / s in fp32."""
        values = self.values.float()
        if self.inverse.dim() == 0:
            return values * self.inverse
        tiles = [size // count for size, count in zip(values.shape, self.inverse.shape, strict=True)]
        return (_tiled(values, tiles) * self.inverse[:, None, :, None]).view_as(values)


class CachedWeight:
    """Base class for linear layers that can cache their rounded weight while the weight does not change."""

    def forget(self) -> None:
        """Drop the cached weight, because the weight may have changed."""
        raise NotImplementedError


class Slots(NamedTuple):
    """Delayed scaling's values for one linear layer, by role."""

    greatest_3: Tensor  # the largest |t| in this step
    scale_3: Tensor  # the scale s


class Part(NamedTuple):
    """Rectangular part of a tensor with FP8 statistics in a checkpoint."""

    key: str  # the full tensor's name in the checkpoint
    shape: tuple[int, ...]  # the full tensor's shape
    offset: tuple[int, ...]  # index of the part's first element in the full tensor
    data: Tensor  # the part's elements


class ScalingStatistics:
    """Interface between an engine and FP8 statistics. This base class serves recipes without statistics."""

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for one step's forward and backward passes."""
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes that must leave the statistics unchanged."""
        return nullcontext()

    def settle(self, accepted: bool) -> None:
        """Update the statistics if the engine has accepted the step, otherwise discard the step's statistics."""

    def parts(self) -> Iterable[Part]:
        """Return views of all statistics that the next step needs.

        A checkpoint has two tensors for each weight NAME: `fp8_history.NAME` (3, H) and `fp8_scale.NAME` (3,).
        """
        return ()


def scale_of(greatest: Tensor, largest: float) -> Tensor:
    """Return the scale that maps `greatest`, the largest |t|, to `largest`, a format's largest value.

    The scale is 1 if `greatest` is zero or infinite.
    """
    scale = (largest / greatest).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((greatest == 0) | torch.isinf(greatest), 1.0, scale)


def round_by(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    """Round a tensor to a format, with one scale."""
    largest = torch.finfo(dtype).max
    return Rounded((tensor.float() * scale).clamp_(-largest, largest).to(dtype), 1 / scale)


def round_tiles(tensor: Tensor, tiles: tuple[int, int], dtype: torch.dtype) -> Rounded:
    """Round a matrix to a format, with a power of two as each tile's scale.

    `tiles` has the numbers of rows and columns in a tile. Raises ValueError if they do not divide the matrix's shape.
    """
    if any(size % tile for size, tile in zip(tensor.shape, tiles, strict=True)):
        tile_shape = f"{tiles[0]} x {tiles[1]}"
        raise ValueError(
            f"a matrix of {tuple(tensor.shape)} can't be divided into tiles of {tile_shape}, which fp8_block needs"
        )
    largest = torch.finfo(dtype).max
    parts = _tiled(tensor.float(), tiles)
    scale = _power_of_two_below(scale_of(parts.abs().amax((1, 3)), largest))
    values = (parts * scale[:, None, :, None]).clamp_(-largest, largest)
    return Rounded(values.view_as(tensor).to(dtype), 1 / scale)


def _tiled(matrix: Tensor, tiles: tuple[int, ...] | list[int]) -> Tensor:
    """Return a view of a matrix with the axes (tiles down, rows per tile, tiles across, columns per tile)."""
    down, across = (max(1, tile) for tile in tiles)
    return matrix.contiguous().view(matrix.shape[0] // down, down, matrix.shape[1] // across, across)


def _power_of_two_below(scale: Tensor) -> Tensor:
    """Return the largest power of two that does not exceed the scale; nan stays nan."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(mantissa.isnan(), scale, torch.ldexp(torch.ones_like(scale), exponent - 1))


@dataclass(frozen=True)
class Rounding:
    """Rounds the tensors of one linear layer by a recipe; in training, delayed scaling also records the largest |t|."""

    recipe: Precision
    slots: Slots
    training: bool

    def __call__(self, matrix: Tensor, role: Role, summed_axis: int = 1) -> Rounded:
        """Round a matrix for a matrix product that sums over its axis `summed_axis`."""
        if self.recipe == Precision.fp8_block:
            run = (1, TILE) if summed_axis == 1 else (TILE, 1)
            return round_tiles(matrix, (TILE, TILE) if role is Role.weight else run, E4M3)
        dtype = FORMATS[role]
        if self.recipe == Precision.fp8_current:
            greatest = _greatest(matrix)
            return round_by(matrix, scale_of(greatest, torch.finfo(dtype).max), dtype)
        if self.training:
            slot = self.slots.greatest_3[role]
            slot.copy_(torch.maximum(slot, _greatest(matrix)))
        return round_by(matrix, self.slots.scale_3[role], dtype)

    def again(self, matrix: Tensor, role: Role, before: Rounded) -> Rounded:
        """Return a matrix rounded for the matrix product that sums over tokens.

        `before` is this matrix, rounded for the matrix product that sums over channels. Only fp8_block rounds again,
        because its tiles lie along the summed axis; other recipes reuse `before`.
        """
        if self.recipe == Precision.fp8_block:
            return self(matrix, role, summed_axis=0)
        return before


def _greatest(matrix: Tensor) -> Tensor:
    """Return the largest |t|, in fp32."""
    low, high = torch.aminmax(matrix)
    return torch.maximum(-low, high).float()


class _Product(torch.autograd.Function):
    """Linear layer with x (T, I) and W (O, I), both rounded to FP8; the output is y (T, O).

    `kept` is the rounded weight if it is cached, otherwise None.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, rounding: Rounding, kept: Rounded | None) -> Tensor:
        x = rounding(x_TI, Role.x)
        if kept is None:
            weight = rounding(weight_OI, Role.weight)
        else:
            weight = kept
        y_TO = x.floats() @ weight.floats().T
        # x is saved only for W's gradient. For fp8_block it is rounded again in tiles along the tokens, so the
        # number of tokens must be a multiple of the tile size. A frozen W does not need this.
        if rounding.training:
            learns = ctx.needs_input_grad[1]
            ctx.save_for_backward(*weight, *(rounding.again(x_TI, Role.x, x) if learns else ()))
            ctx.rounding = rounding
            ctx.dtypes = (x_TI.dtype, weight_OI.dtype)
        return y_TO.to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight_values, weight_inverse, *x = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dx_TI = dweight_OI = None
        dy = ctx.rounding(dy_TO, Role.dy)
        if ctx.needs_input_grad[0]:
            dx_TI = (dy.floats() @ Rounded(weight_values, weight_inverse).floats()).to(x_dtype)
        if ctx.needs_input_grad[1]:
            x_values, x_inverse = x
            dy = ctx.rounding.again(dy_TO, Role.dy, dy)
            dweight_OI = (dy.floats().T @ Rounded(x_values, x_inverse).floats()).to(weight_dtype)
        return dx_TI, dweight_OI, None, None


class Fp8Linear(CachedWeight, nn.Module):
    """Linear layer without a bias, x @ weight.T, in emulated FP8 on one rank."""

    rounded: Rounded | None = None  # the cached rounded weight

    def __init__(self, in_features: int, out_features: int, fp8: Fp8) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.slots = Slots(torch.zeros(3), torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        # A forward pass without gradients must not change the statistics or the cached weight.
        rounding = Rounding(self.fp8.recipe, self.slots, training=torch.is_grad_enabled())
        if rounding.training and self.fp8.cache_weights and self.rounded is None:
            self.rounded = rounding(self.weight.detach(), Role.weight)
        cached_weight = self.rounded if rounding.training else None
        y_TO = _Product.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), self.weight, rounding, cached_weight)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def forget(self) -> None:
        self.rounded = None
