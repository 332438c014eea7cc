"""Emulated FP8 products for any device: values are rounded as FP8 does, then multiplied in fp32.

    y = q(x) q(W)^T        dx = q(dy) q(W)        dW = q(dy)^T q(x)            q(t) = round(clamp(t s)) / s

`round` goes to the nearest value of an eight-bit format: e4m3 (up to 448) for x and W, e5m2 (up to 57344) for dy.
Values beyond the range are set to its end, infinities too; nan stays nan. Every scale s fills the range, by the rules
of Transformer Engine 2.x and its defaults:

    fp8_delayed   s = range / largest |t| of the last steps, fixed within a step (`fp8_statistics.py`); 1 at the start
    fp8_current   s = range / largest |t| of this very tensor; each tensor-parallel rank scales its shard of W or dy
    fp8_block     s for each tile, rounded down to a power of two: x and dy in runs of 128 along the axis that is summed
                  over (so they are rounded once for each of their two products), W in tiles of 128 x 128; all in e4m3

s is 1 for zeros, and where the largest value is infinite. Products are summed in fp32 and rounded to the type of x,
and W's gradient to that of W; a tensor core sums the same exact products in an order of its own. Rounded tensors are
saved for the backward pass with one byte per value. This is not fast and uses no FP8 hardware.

Legend: T tokens of all rows, I input features, O output features.
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
    """Role of a rounded tensor in its product; also its row in the statistics."""

    x = 0
    weight = 1
    dy = 2


FORMATS = {Role.x: E4M3, Role.weight: E4M3, Role.dy: E5M2}


@dataclass(frozen=True)
class Fp8:
    """Settings of FP8 products: the scaling recipe, the sub-layers that use it, and emulation or Transformer Engine."""

    recipe: Precision
    layers: range  # projections of the other sub-layers stay in bf16
    history: int = 1024
    emulate: bool = True
    cache_weights: bool = False  # keep rounded weights until `forget`
    group: ProcessGroup | None = None  # ranks whose maxima delayed scaling combines; None without process groups

    @property
    def delayed(self) -> bool:
        return self.recipe == Precision.fp8_delayed


class Rounded(NamedTuple):
    """An FP8 tensor, and the inverse scale that maps its values back; `inverse` has one entry, or one per tile."""

    values: Tensor
    inverse: Tensor

    def floats(self) -> Tensor:
        """Return the rounded tensor in fp32."""
        values = self.values.float()
        if self.inverse.dim() == 0:
            return values * self.inverse
        tiles = [size // count for size, count in zip(values.shape, self.inverse.shape, strict=True)]
        return (_tiled(values, tiles) * self.inverse[:, None, :, None]).view_as(values)


class CachedWeight:
    """A projection that can cache its rounded weight as long as the weight stays the same."""

    def forget(self) -> None:
        """Drop the cached weight, because the weight may have changed."""
        raise NotImplementedError


class Slots(NamedTuple):
    """Delayed scaling's values for one projection, by role: the largest |t| of this step so far, and this step's
    scale.
    """

    greatest_3: Tensor
    scale_3: Tensor


class Part(NamedTuple):
    """Rectangle of the FP8 statistics for a checkpoint: its key, the full shape, its offset and its data."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


class ScalingStatistics:
    """Interface through which an engine drives FP8 statistics. The base class keeps none."""

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for the forward and backward passes of one step."""
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes that must leave the statistics unchanged."""
        return nullcontext()

    def settle(self, accepted: bool) -> None:
        """Update the statistics after an accepted step, or discard those of a refused one."""

    def parts(self) -> Iterable[Part]:
        """Return all statistics that the next step depends on, as views: `fp8_history.NAME` (3, H) and
        `fp8_scale.NAME` (3,).
        """
        return ()


def scale_of(greatest: Tensor, largest: float) -> Tensor:
    """Return the scale that maps the largest value to the end of a format's range; 1 if it is zero or infinite."""
    scale = (largest / greatest).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((greatest == 0) | torch.isinf(greatest), 1.0, scale)


def round_by(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    """Round a tensor to a format, with one scale."""
    largest = torch.finfo(dtype).max
    return Rounded((tensor.float() * scale).clamp_(-largest, largest).to(dtype), 1 / scale)


def round_tiles(tensor: Tensor, tiles: tuple[int, int], dtype: torch.dtype) -> Rounded:
    """Round a matrix to a format, with a power of two as the scale of each tile.

    Raises ValueError if the tile size does not divide the shape.
    """
    if any(size % tile for size, tile in zip(tensor.shape, tiles, strict=True)):
        tile_shape = f"{tiles[0]} x {tiles[1]}"
        raise ValueError(
            f"a matrix of {tuple(tensor.shape)} is not made of whole tiles of {tile_shape}, as fp8_block needs"
        )
    largest = torch.finfo(dtype).max
    parts = _tiled(tensor.float(), tiles)
    scale = _power_of_two_below(scale_of(parts.abs().amax((1, 3)), largest))
    values = (parts * scale[:, None, :, None]).clamp_(-largest, largest)
    return Rounded(values.view_as(tensor).to(dtype), 1 / scale)


def _tiled(matrix: Tensor, tiles: tuple[int, ...] | list[int]) -> Tensor:
    """Return a matrix as a view (tile rows, rows per tile, tile columns, columns per tile)."""
    down, across = (max(1, tile) for tile in tiles)
    return matrix.contiguous().view(matrix.shape[0] // down, down, matrix.shape[1] // across, across)


def _power_of_two_below(scale: Tensor) -> Tensor:
    """Return the largest power of two that does not exceed the scale; nan stays nan."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(mantissa.isnan(), scale, torch.ldexp(torch.ones_like(scale), exponent - 1))


@dataclass(frozen=True)
class Rounding:
    """Rounds one projection's tensors by its recipe. In training it also records their largest values."""

    recipe: Precision
    slots: Slots
    training: bool

    def __call__(self, matrix: Tensor, role: Role, summed_axis: int = 1) -> Rounded:
        """Round a matrix for a product that sums over `summed_axis`."""
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
        """Return a matrix rounded for the product that sums over tokens.

        Only fp8_block rounds again, because its tiles lie along the summed axis; other recipes reuse `before`.
        """
        if self.recipe == Precision.fp8_block:
            return self(matrix, role, summed_axis=0)
        return before


def _greatest(matrix: Tensor) -> Tensor:
    """Return the largest |t|, in fp32."""
    low, high = torch.aminmax(matrix)
    return torch.maximum(-low, high).float()


class _Product(torch.autograd.Function):
    """Product of x (T, I) and W (O, I) -> y (T, O), with both rounded to FP8."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, rounding: Rounding, kept: Rounded | None) -> Tensor:
        x = rounding(x_TI, Role.x)
        if kept is None:
            weight = rounding(weight_OI, Role.weight)
        else:
            weight = kept
        y_TO = x.floats() @ weight.floats().T
        # Tiles along the tokens serve W's gradient alone, so without training the number of tokens is arbitrary.
        if rounding.training:
            ctx.save_for_backward(*rounding.again(x_TI, Role.x, x), *weight)
            ctx.rounding = rounding
            ctx.dtypes = (x_TI.dtype, weight_OI.dtype)
        return y_TO.to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_values, x_inverse, weight_values, weight_inverse = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dy = ctx.rounding(dy_TO, Role.dy)
        dx_TI = dy.floats() @ Rounded(weight_values, weight_inverse).floats()
        dy = ctx.rounding.again(dy_TO, Role.dy, dy)
        dweight_OI = dy.floats().T @ Rounded(x_values, x_inverse).floats()
        return dx_TI.to(x_dtype), dweight_OI.to(weight_dtype), None, None


class Fp8Linear(CachedWeight, nn.Module):
    """One rank's x @ weight.T in emulated FP8, without a bias."""

    rounded: Rounded | None = None

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
