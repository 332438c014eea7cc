"""Rotations with channel pairs as complex numbers: one product in place; backward multiplies by the conjugate.

    y = (x + bias) e^(i theta):   d(x + bias) = dy e^(-i theta),   dtheta = Im(conj(y) dy)

Backward keeps the angles and the results, which later ops keep as well.

Legend: as in `reference`; R heads of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.turns.reference import TurnInputs


@untraced  # torch.compile can't generate code for complex numbers
def turn_pairs(inputs: TurnInputs) -> tuple[Tensor, Tensor]:
    return _Turn.apply(*inputs)


COMPLEX = Implementation("complex", turn_pairs)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *fields: Tensor) -> tuple[Tensor, ...]:
        *tokens, k_bias_HN, q_bias_HN, angles_BLHS = fields
        rotation_BLHS = torch.polar(torch.ones_like(angles_BLHS), angles_BLHS)
        outputs = []
        for x_BLGN, bias_HN in zip(tokens, (k_bias_HN, q_bias_HN), strict=True):
            wide = at_least_fp32(x_BLGN)
            by_group = wide.unsqueeze(3) + bias_HN.to(wide.dtype).unflatten(0, (x_BLGN.shape[2], -1))
            x_BLHN = _even(by_group.flatten(2, 3))
            _pairs(x_BLHN, angles_BLHS.shape[3]).mul_(rotation_BLHS)
            outputs.append(x_BLHN.to(x_BLGN.dtype))
        ctx.save_for_backward(angles_BLHS, *outputs)
        ctx.groups = tokens[0].shape[2]
        ctx.kinds = (k_bias_HN.dtype, q_bias_HN.dtype)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        angles_BLHS, *outputs = ctx.saved_tensors
        inverse_BLHS = torch.polar(torch.ones_like(angles_BLHS), -angles_BLHS)
        of_angles_BLHS = torch.zeros_like(angles_BLHS)
        of_tokens = []
        of_biases = []
        for grad_BLHN, y_BLHN, kind in zip(grads, outputs, ctx.kinds, strict=True):
            wide = torch.empty(grad_BLHN.shape, dtype=inverse_BLHS.real.dtype, device=grad_BLHN.device).copy_(grad_BLHN)
            wide = _even(wide)
            y_BLHN = _even(at_least_fp32(y_BLHN))
            of_pairs = _pairs(wide, angles_BLHS.shape[3])
            pairs = _pairs(y_BLHN, angles_BLHS.shape[3])
            of_angles_BLHS += (pairs.conj() * of_pairs).imag
            of_pairs.mul_(inverse_BLHS)
            of_tokens.append(wide.unflatten(2, (ctx.groups, -1)).sum(3).to(grad_BLHN.dtype))
            of_biases.append(wide.sum((0, 1)).to(kind))
        return *of_tokens, *of_biases, of_angles_BLHS


def _even(x_BLHN: Tensor) -> Tensor:
    """Return values whose channels are contiguous and begin at even offsets, as complex views need; copy if not."""
    *strides, last = x_BLHN.stride()
    if last == 1 and not any(stride % 2 for stride in strides):
        return x_BLHN
    size = x_BLHN.shape[3]
    return x_BLHN.new_empty(*x_BLHN.shape[:3], size + size % 2)[..., :size].copy_(x_BLHN)


def _pairs(x_BLHN: Tensor, angles: int) -> Tensor:
    """Return the rotated channels as complex numbers (B, L, H, S) in the same memory."""
    return torch.view_as_complex(x_BLHN[..., : 2 * angles].unflatten(-1, (angles, 2)))
