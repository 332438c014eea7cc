"""The gated norm in torch, with backward passes of its own: they save only the inputs and compute v again.

With v = y silu(z) and its gradient dv: dy = dv silu(z), and dz = dv y silu'(z).

    of the squares     dv = 2 v dsquares
    of the output      dv = dout weight scale
                       dscale = sum over the head of dout weight v,   dweight = sum over tokens of dout v scale

Legend as in `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.gated_norm.reference import GatedNormInputs, GatedScaleInputs, GatedSquaresInputs, gated
from hybridtron.ops.precision import at_least_fp32

CHUNK = 128  # tokens at a time on a CPU


class _GatedSquares(torch.autograd.Function):
    """Autograd function that saves y and z."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        ctx.save_for_backward(y_BLHP, z_BLHP)
        chunks = _chunks(y_BLHP)
        return torch.cat([gated(y_BLHP[:, c], z_BLHP[:, c]).square_().sum(-1) for c in chunks], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        y_BLHP, z_BLHP = ctx.saved_tensors
        grad_y = _empty_like(y_BLHP)
        grad_z = _empty_like(z_BLHP)
        for c in _chunks(y_BLHP):
            y, z, open_z = _parts(y_BLHP[:, c], z_BLHP[:, c])
            grad_v = (open_z * y).mul_(2 * grads[0][:, c].unsqueeze(-1))
            grad_y[:, c], grad_z[:, c] = _backward_of_gated(grad_v, y, z, open_z)
        return grad_y, grad_z


class _GatedScale(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, y_BLHP: Tensor, z_BLHP: Tensor, scale_BLH: Tensor, weight_HP: Tensor) -> Tensor:
        ctx.save_for_backward(y_BLHP, z_BLHP, scale_BLH, weight_HP)
        out_BLHP = _empty_like(y_BLHP)
        for c in _chunks(y_BLHP):
            v = gated(y_BLHP[:, c], z_BLHP[:, c]).mul_(scale_BLH[:, c].unsqueeze(-1))
            out_BLHP[:, c] = v.mul_(weight_HP.to(v.dtype))
        return out_BLHP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        y_BLHP, z_BLHP, scale_BLH, weight_HP = ctx.saved_tensors
        grad_y = _empty_like(y_BLHP)
        grad_z = _empty_like(z_BLHP)
        grad_scale = _empty_like(scale_BLH)
        wide_weight = at_least_fp32(weight_HP)
        grad_weight = torch.zeros_like(wide_weight)
        for c in _chunks(y_BLHP):
            y, z, open_z = _parts(y_BLHP[:, c], z_BLHP[:, c])
            grad = at_least_fp32(grads[0][:, c])
            scale = scale_BLH[:, c].unsqueeze(-1)
            v = open_z * y
            grad_v = grad * wide_weight
            grad_scale[:, c] = (grad_v * v).sum(-1)
            grad_weight += v.mul_(grad).mul_(scale).sum((0, 1))
            grad_y[:, c], grad_z[:, c] = _backward_of_gated(grad_v.mul_(scale), y, z, open_z)
        return grad_y, grad_z, grad_scale, grad_weight.to(weight_HP.dtype)


def _chunks(y_BLHP: Tensor) -> list[slice]:
    """Cut the tokens into chunks that fit into a CPU's cache; a GPU takes all of them at once."""
    length = y_BLHP.shape[1]
    step = CHUNK if y_BLHP.device.type == "cpu" else max(1, length)
    return [slice(start, start + step) for start in range(0, max(1, length), step)]


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _parts(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, z and silu(z), in fp32 or float64."""
    wide_z = at_least_fp32(z)
    return at_least_fp32(y), wide_z, F.silu(wide_z)


def _backward_of_gated(grad_v: Tensor, y: Tensor, z: Tensor, open_z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and z, given that of v = y silu(z)."""
    return grad_v * open_z, torch.ops.aten.silu_backward(grad_v * y, z)


def gated_norm(inputs: GatedNormInputs) -> Tensor:
    """Compute the full norm by its two steps, with a group in the place of a head."""
    y_BLGK, z_BLGK = (x_BLE.unflatten(-1, (inputs.groups, -1)) for x_BLE in (inputs.y_BLE, inputs.z_BLE))
    mean_BLG = _GatedSquares.apply(y_BLGK, z_BLGK) / y_BLGK.shape[-1]
    weight_GK = inputs.weight_E.unflatten(0, (inputs.groups, -1))
    return _GatedScale.apply(y_BLGK, z_BLGK, torch.rsqrt(mean_BLG + inputs.eps), weight_GK).flatten(2)


def gated_squares(inputs: GatedSquaresInputs) -> Tensor:
    return _GatedSquares.apply(*inputs)


def gated_scale(inputs: GatedScaleInputs) -> Tensor:
    return _GatedScale.apply(*inputs)


NORM = Implementation("recomputed", gated_norm)
SQUARES = Implementation("recomputed", gated_squares)
SCALE = Implementation("recomputed", gated_scale)
