"""FP8 products, emulated on any device: values are rounded as FP8 does, and multiplied in fp32.

    y = q(x) q(W)^T        dx = q(dy) q(W)        dW = q(dy)^T q(x)            q(t) = round(clamp(t s)) / s

`round` goes to the nearest value of a format of eight bits, e4m3 (up to 448) for x and W, e5m2 (up to 57344) for dy.
Values beyond the range are set to its end, so an infinite one too; nan stays nan. Every s fills the range, by the
rules of Transformer Engine 2.x and its defaults:

    fp8_delayed   s = range / greatest |t| of the last steps, fixed within a step (`fp8_statistics.py`); 1 at the start
    fp8_current   s = range / greatest |t|, of this very tensor; a tensor-parallel rank's share of W or dy is its own
    fp8_block     s for each tile, rounded down to a power of two: x and dy in runs of 128 along the axis that is summed
                  over (so they are rounded once for each of their two products), W in tiles of 128 x 128; all in e4m3

s is 1 for zeros, and where the greatest value is infinite. Products are summed in fp32 and rounded to the type of x, as
W's gradient is to that of W; a tensor core sums the same exact products in an order of its own. Rounded tensors are
kept for the backward pass in one byte a value. This is not fast, and no kernel of a device is used.

T tokens of all rows, I input features, O output features.
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

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 128


class Role(IntEnum):
    """What a rounded tensor is in its product, and its row in the statistics."""

    x = 0
    weight = 1
    dy = 2


FORMATS = {Role.x: E4M3, Role.weight: E4M3, Role.dy: E5M2}


@dataclass(frozen=True)
class Fp8:
    """How a run's large projections multiply: which rule, in which sub-layers, by emulation or Transformer Engine."""

    recipe: Precision
    layers: range  # those of the others stay in bf16
    history: int = 1024
    emulate: bool = True
    cache_weights: bool = False  # what `forget` ends
    group: ProcessGroup | None = None  # whose greatest values delayed scaling shares; None without any groups

    @property
    def delayed(self) -> bool:
        return self.recipe == Precision.fp8_delayed


class Rounded(NamedTuple):
    """A tensor in FP8, and what its values are multiplied by to be those of the tensor; as many axes as it has."""

    values: Tensor
    inverse: Tensor

    def floats(self) -> Tensor:
        """The tensor as FP8 has it, in fp32."""
        values = self.values.float()
        if self.inverse.dim() == 0:
            return values * self.inverse
        tiles = [size // count for size, count in zip(values.shape, self.inverse.shape, strict=True)]
        return (_tiled(values, tiles) * self.inverse[:, None, :, None]).view_as(values)


class CachedWeight:
    """A projection that can keep its rounded weight over passes in which the weight is the same."""

    def forget(self) -> None:
        """The weight may be another from here on."""
        raise NotImplementedError


class Slots(NamedTuple):
    """What delayed scaling keeps of a projection, by role: greatest |t| of this step so far, and s of this step."""

    greatest_3: Tensor
    scale_3: Tensor


class Part(NamedTuple):
    """A rectangle of the statistics, for a checkpoint: its key, the whole one's shape, where it lies, its entries."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


class ScalingStatistics:
    """What an engine asks of the products' statistics; those that are kept nowhere, unless a subclass keeps some."""

    def step(self) -> AbstractContextManager[Any]:
        """Around the forward and backward passes of a step."""
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[Any]:
        """Around forward passes that leave no trace."""
        return nullcontext()

    def settle(self, accepted: bool) -> None:
        """After the step was accepted or refused."""

    def parts(self) -> Iterable[Part]:
        """All that the next step depends on, as views: `fp8_history.NAME` (3, H) and `fp8_scale.NAME` (3,)."""
        return ()


def scale_of(greatest: Tensor, largest: float) -> Tensor:
    """What fills the range of a format; 1 for zeros, and where the greatest value is infinite."""
    scale = (largest / greatest).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((greatest == 0) | torch.isinf(greatest), 1.0, scale)


def round_by(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    """A tensor rounded to a format by one scale."""
    largest = torch.finfo(dtype).max
    return Rounded((tensor.float() * scale).clamp_(-largest, largest).to(dtype), 1 / scale)


def round_tiles(tensor: Tensor, tiles: tuple[int, int], dtype: torch.dtype) -> Rounded:
    """A matrix rounded to a format, every tile of this size by a power of two of its own."""
    if any(size % tile for size, tile in zip(tensor.shape, tiles, strict=True)):
        wanted = f"{tiles[0]} x {tiles[1]}"
        raise ValueError(
            f"a matrix of {tuple(tensor.shape)} is not made of whole tiles of {wanted}, as fp8_block needs"
        )
    largest = torch.finfo(dtype).max
    parts = _tiled(tensor.float(), tiles)
    scale = _power_of_two_below(scale_of(parts.abs().amax((1, 3)), largest))
    values = (parts * scale[:, None, :, None]).clamp_(-largest, largest)
    return Rounded(values.view_as(tensor).to(dtype), 1 / scale)


def _tiled(matrix: Tensor, tiles: tuple[int, ...] | list[int]) -> Tensor:
    """(rows of tiles, rows in one, columns of tiles, columns in one)"""
    down, across = (max(1, tile) for tile in tiles)
    return matrix.contiguous().view(matrix.shape[0] // down, down, matrix.shape[1] // across, across)


def _power_of_two_below(scale: Tensor) -> Tensor:
    """The greatest power of two that is at most this; nan stays nan."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(mantissa.isnan(), scale, torch.ldexp(torch.ones_like(scale), exponent - 1))


@dataclass(frozen=True)
class Rounding:
    """Rounds the tensors of one projection as its recipe says, and in training remembers their greatest values."""

    recipe: Precision
    slots: Slots
    training: bool

    def __call__(self, matrix: Tensor, role: Role, summed_axis: int = 1) -> Rounded:
        """A matrix for a product that sums over this axis of it."""
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
        """For the product that sums over tokens: what was rounded before, unless tiles lie along the summed axis."""
        return self(matrix, role, summed_axis=0) if self.recipe == Precision.fp8_block else before


def _greatest(matrix: Tensor) -> Tensor:
    """The greatest |t|, in fp32."""
    low, high = torch.aminmax(matrix)
    return torch.maximum(-low, high).float()


class _Product(torch.autograd.Function):
    """x (T, I), W (O, I) -> y (T, O)."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, rounding: Rounding, kept: Rounded | None) -> Tensor:
        x = rounding(x_TI, Role.x)
        weight = rounding(weight_OI, Role.weight) if kept is None else kept
        y_TO = x.floats() @ weight.floats().T
        if rounding.training:  # of any number of tokens otherwise: tiles along them are of W's gradient alone
            ctx.save_for_backward(*rounding.again(x_TI, Role.x, x), *weight)
            ctx.rounding, ctx.dtypes = rounding, (x_TI.dtype, weight_OI.dtype)
        return y_TO.to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_values, x_inverse, weight_values, weight_inverse = ctx.saved_tensors
        of_x, of_weight = ctx.dtypes
        dy = ctx.rounding(dy_TO, Role.dy)
        dx_TI = dy.floats() @ Rounded(weight_values, weight_inverse).floats()
        dy = ctx.rounding.again(dy_TO, Role.dy, dy)
        dweight_OI = dy.floats().T @ Rounded(x_values, x_inverse).floats()
        return dx_TI.to(of_x), dweight_OI.to(of_weight), None, None


class Fp8Linear(CachedWeight, nn.Module):
    """One rank's x @ weight.T in emulated FP8, without a bias."""

    rounded: Rounded | None = None

    def __init__(self, in_features: int, out_features: int, fp8: Fp8) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.slots = Slots(torch.zeros(3), torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        # what is evaluated without gradients leaves no trace in training
        rounding = Rounding(self.fp8.recipe, self.slots, training=torch.is_grad_enabled())
        if rounding.training and self.fp8.cache_weights and self.rounded is None:
            self.rounded = rounding(self.weight.detach(), Role.weight)
        kept = self.rounded if rounding.training else None
        y_TO = _Product.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), self.weight, rounding, kept)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def forget(self) -> None:
        self.rounded = None
