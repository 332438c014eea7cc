"""The selective scan by the mamba-ssm package's CUDA kernel, completed by what that kernel lacks.

The kernel takes no initial state and ignores the gradient of its last state. The recurrence is affine in its initial
state, so what the state contributes is added in closed form: C_t exp(A (delta_1 + ... + delta_t)) h_0. The op's
list tries that only after kernels that take a state.

It knows no document borders. Tested against a stand-in for the package only; unmeasured on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hybridtron.device import optional_package
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.chunked import chunked
from hybridtron.ops.scan.reference import ScanInputs, step_sizes

PACKAGE = "mamba_ssm.ops.selective_scan_interface"
SHARE_CHUNK = 256  # tokens whose share of an initial state is computed at once


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.documents_BL is not None:
        return "the kernel knows no document borders"
    if inputs.A_EN.shape[1] > 256:
        return f"the kernel takes a state size of at most 256, not {inputs.A_EN.shape[1]}"
    return "the kernel has no float64" if inputs.x_BLE.dtype == torch.float64 else None


def _unsupported_alone_reason(inputs: ScanInputs) -> str | None:
    return "the kernel takes no initial state" if inputs.state_BEN is not None else _unsupported_reason(inputs)


def _repeats_bits() -> bool:
    """Its backward pass adds up the gradients of A, B, C and D by atomic additions, whatever torch asks for."""
    return False


def mamba_ssm(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The recurrence is affine in its initial state: the kernel starts from zero and the state's share is added."""
    x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, D_E, dt_bias_E, z_BLE, state_BEN, _ = inputs
    wide = wide_type(x_BLE)
    per_token = [t for t in (x_BLE, dt_BLE, B_BLN, C_BLN, z_BLE) if t is not None]
    shared = functools.reduce(torch.promote_types, (t.dtype for t in per_token))  # the kernel wants one type for all
    x, dt, B, C, *z = (t.transpose(1, 2).to(shared) for t in per_token)
    package = optional_package(PACKAGE).module
    assert package is not None
    y_BEL, last_BEN = package.selective_scan_fn(
        x,
        dt,
        A_EN.to(wide),
        B,
        C,
        D_E.to(wide),
        z=z[0] if z else None,
        delta_bias=dt_bias_E.to(wide),
        delta_softplus=True,
        return_last_state=True,
    )
    y_BLE = y_BEL.transpose(1, 2)
    if state_BEN is not None:
        y_BLE = y_BLE + _share_of_initial_state(inputs, state_BEN)
    return y_BLE.to(x_BLE.dtype), _LastState.apply(last_BEN, x_BLE, dt_BLE, A_EN, B_BLN, dt_bias_E, state_BEN)


ALONE = Implementation("mamba-ssm", mamba_ssm, "cuda", PACKAGE, _unsupported_alone_reason, _repeats_bits)
COMPLETED = Implementation("mamba-ssm+h0", mamba_ssm, "cuda", PACKAGE, _unsupported_reason, _repeats_bits)
"""The same with an initial state, whose share is added in torch: for where kernels that take a state can't run."""


def _share_of_initial_state(inputs: ScanInputs, state_BEN: Tensor) -> Tensor:
    """C_t exp(A (delta_1 + ... + delta_t)) h_0, times the gate; a chunk at a time, computed again in backward."""

    A_EN, C_BLN, z_BLE = inputs.A_EN, inputs.C_BLN, inputs.z_BLE

    def share(elapsed_BTE: Tensor, C_BTN: Tensor) -> Tensor:
        return (torch.exp(elapsed_BTE.unsqueeze(3) * A_EN) * state_BEN.unsqueeze(1) * C_BTN.unsqueeze(2)).sum(3)

    elapsed_BLE = step_sizes(inputs.dt_BLE, inputs.dt_bias_E).cumsum(1)
    chunks = zip(
        elapsed_BLE.split(SHARE_CHUNK, dim=1), C_BLN.to(wide_type(C_BLN)).split(SHARE_CHUNK, dim=1), strict=True
    )
    share_BLE = torch.cat(
        [checkpoint(share, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks], dim=1
    )
    return share_BLE if z_BLE is None else share_BLE * F.silu(z_BLE.to(wide_type(z_BLE)))


class _LastState(torch.autograd.Function):
    """Completes the kernel's last state, whose gradient it ignores.

    A gradient rarely arrives here, since states are mostly detached between rows; when it does, `chunked` runs again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        last_BEN: Tensor,
        x_BLE: Tensor,
        dt_BLE: Tensor,
        A_EN: Tensor,
        B_BLN: Tensor,
        dt_bias_E: Tensor,
        state_BEN: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x_BLE, dt_BLE, A_EN, B_BLN, dt_bias_E, state_BEN)
        if state_BEN is None:
            return last_BEN.clone()
        elapsed_BE = step_sizes(dt_BLE, dt_bias_E).sum(1)
        return last_BEN + torch.exp(elapsed_BE.unsqueeze(2) * A_EN) * state_BEN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BEN: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
            x_BLE, dt_BLE, A_EN, B_BLN, dt_bias_E, state_BEN = leaves
            no_D, C_BLN = torch.zeros_like(A_EN[:, 0]), B_BLN.detach()  # they reach the outputs only
            inputs = ScanInputs(x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, no_D, dt_bias_E, state_BEN=state_BEN)
            _, last_BEN = chunked(inputs)
        grads = iter(torch.autograd.grad(last_BEN, [t for t in leaves if t is not None], grad_BEN))
        return (None, *(None if t is None else next(grads) for t in leaves))
