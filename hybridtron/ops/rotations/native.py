"""Rotation angles, and rotated keys and queries, by compiled C++ (`native/angles.cpp`, `native/turns.cpp`).

Each tensor is read once or written once. For the backward pass, `angles` saves its inputs. `turn_pairs` saves the
angles and its results. The results need no additional memory, since the ops after `turn_pairs` save them too.

Legend: B rows (sequences in the batch), L tokens per row, H heads, G head groups, N channels per key or query, S angles
per head.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.library import call, missing, threads, token_blocks
from hybridtron.ops.native.tensors import Tokens, address, first_part, readable, scalar, starts_of
from hybridtron.ops.precision import wide_type
from hybridtron.ops.rotations.reference import AngleInputs, TurnInputs

WORTH = 2**16  # result elements per thread: with fewer, an additional thread gains no time


class TurnsTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Turns` in turns.cpp.

    A call rotates only keys or only queries.

    rows, length, heads, size, groups, angles: B, L, H, N, G, S
    add: 1 to add the gradients for the angles to the values in `grad_angles`, 0 to overwrite these values
    x, y: keys or queries before and after the rotation
    cos, sin: the angles' cos and sin
    bias: each head's bias
    grad_...: gradients; `grad_bias` has a partial sum for each token block
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "groups", "angles", "add")),
        *((name, Tokens) for name in ("x", "cos", "sin", "y", "grad_y", "grad_x", "grad_angles")),
        *((name, ctypes.c_void_p) for name in ("bias", "grad_bias")),
    )


class AnglesTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Angles` in angles.cpp.

    rows, length, heads, angles: B, L, H, S
    steps, rates, y: inputs, and the angles
    grad_...: gradients
    starts: mask, True for tokens that begin a document
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "angles")),
        *((name, Tokens) for name in ("steps", "rates", "y", "grad_y", "grad_steps", "grad_rates")),
        ("starts", ctypes.c_void_p),
    )


@untraced  # torch.compile can't trace a function in C++
def angles(inputs: AngleInputs) -> Tensor:
    return _NativeAngles.apply(inputs.steps_BLH, inputs.rates_BLS, starts_of(inputs.documents_BL))


@untraced
def turn_pairs(inputs: TurnInputs) -> tuple[Tensor, Tensor]:
    return _NativeTurn.apply(*inputs)


NATIVE_ANGLES = Implementation("native", angles, "cpu", missing=missing)
NATIVE_TURNS = Implementation("native", turn_pairs, "cpu", missing=missing)


class _NativeAngles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps_BLH: Tensor, rates_BLS: Tensor, starts_BL: Tensor | None) -> Tensor:
        theta_BLHS = steps_BLH.new_empty(*steps_BLH.shape, rates_BLS.shape[2], dtype=wide_type(steps_BLH))
        _call_angles("forward", steps_BLH, rates_BLS, starts_BL, {"y": theta_BLHS})
        ctx.save_for_backward(steps_BLH, rates_BLS, starts_BL)
        return theta_BLHS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHS: Tensor) -> tuple[Tensor, Tensor, None]:
        steps_BLH, rates_BLS, starts_BL = ctx.saved_tensors
        of_steps_BLH, of_rates_BLS = (grad_BLHS.new_empty(tensor.shape) for tensor in (steps_BLH, rates_BLS))
        gradients = {"grad_y": readable(grad_BLHS), "grad_steps": of_steps_BLH, "grad_rates": of_rates_BLS}
        _call_angles("backward", steps_BLH, rates_BLS, starts_BL, gradients)
        return of_steps_BLH.to(steps_BLH.dtype), of_rates_BLS.to(rates_BLS.dtype), None


def _call_angles(
    direction: str, steps_BLH: Tensor, rates_BLS: Tensor, starts_BL: Tensor | None, others: dict[str, Tensor]
) -> None:
    (rows, length, heads) = steps_BLH.shape
    size = rates_BLS.shape[2]
    task = AnglesTask(rows, length, heads, size, starts=address(starts_BL))
    tensors = {"steps": readable(steps_BLH), "rates": readable(rates_BLS)} | others
    for name, tensor in tensors.items():
        setattr(task, name, Tokens.of(tensor))
    kind = scalar(wide_type(steps_BLH))
    call(f"angles_{direction}_{kind}", task, threads(rows * length * heads * size / WORTH))


class _NativeTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *fields: Tensor) -> tuple[Tensor, ...]:
        *tokens, k_bias_HN, q_bias_HN, angles_BLHS = fields
        turns = _turns(angles_BLHS)
        outputs = []
        for x_BLGN, bias_HN in zip(tokens, (k_bias_HN, q_bias_HN), strict=True):
            x_BLGN = readable(x_BLGN)
            bias_HN = bias_HN.to(turns[0].dtype).contiguous()
            y_BLHN = x_BLGN.new_empty(*x_BLGN.shape[:2], *bias_HN.shape)
            task = _task(y_BLHN, x_BLGN.shape[2], turns)
            task.x, task.y, task.bias = Tokens.of(x_BLGN), Tokens.of(y_BLHN), bias_HN.data_ptr()
            call(f"turns_forward_{scalar(bias_HN.dtype)}", task, threads(y_BLHN.numel() / WORTH))
            outputs.append(y_BLHN)
        k_BLHN, q_BLHN = outputs
        ctx.save_for_backward(angles_BLHS, k_BLHN, q_BLHN)
        ctx.groups = tokens[0].shape[2]
        ctx.kinds = [tensor.dtype for tensor in fields]
        return k_BLHN, q_BLHN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        angles_BLHS, *outputs = ctx.saved_tensors
        turns = _turns(angles_BLHS)
        of_tokens = []
        of_biases = []
        of_angles_BLHS = torch.empty_like(turns[0])
        for grad_BLHN, y_BLHN in zip(grads, outputs, strict=True):
            rows, length, heads, size = y_BLHN.shape
            of_x_BLGN = y_BLHN.new_empty(rows, length, ctx.groups, size)
            of_bias = of_angles_BLHS.new_empty(token_blocks(rows * length), heads, size)
            task = _task(y_BLHN, ctx.groups, turns)
            grad_BLHN = readable(grad_BLHN)
            task.y, task.grad_y, task.grad_x = map(Tokens.of, (y_BLHN, grad_BLHN, of_x_BLGN))
            task.grad_angles, task.add, task.grad_bias = Tokens.of(of_angles_BLHS), bool(of_tokens), of_bias.data_ptr()
            call(f"turns_backward_{scalar(of_bias.dtype)}", task, threads(y_BLHN.numel() / WORTH))
            of_tokens.append(of_x_BLGN)
            of_biases.append(first_part(of_bias))
        input_grads = (*of_tokens, *of_biases, of_angles_BLHS)
        return tuple(grad.to(kind) for grad, kind in zip(input_grads, ctx.kinds, strict=True))


def _turns(angles_BLHS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angles' cos and sin, computed by torch because its functions are vectorized."""
    angles_BLHS = angles_BLHS.contiguous()
    return angles_BLHS.cos(), angles_BLHS.sin()


def _task(y_BLHN: Tensor, groups: int, turns: tuple[Tensor, Tensor]) -> TurnsTask:
    (rows, length, heads, size) = y_BLHN.shape
    (cos, sin) = map(Tokens.of, turns)
    sizes = {"rows": rows, "length": length, "heads": heads, "size": size, "groups": groups}
    return TurnsTask(**sizes, angles=turns[0].shape[3], cos=cos, sin=sin)
