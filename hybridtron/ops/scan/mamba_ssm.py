"""The selective scan by the mamba-ssm package's CUDA kernel.

The kernel's backward pass ignores the gradient of the last state; this module adds this gradient's contribution. The
kernel supports neither an initial state nor document boundaries. For such inputs, another implementation is selected.

The tests use a stand-in for the package. The package itself was checked once, on an H200 (benchmarks/gpu.md).

Legend: B rows (sequences in a batch), L tokens, E inner channels, N state entries per channel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.device import optional_package
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.chunked import chunked
from hybridtron.ops.scan.reference import ScanInputs

PACKAGE = "mamba_ssm.ops.selective_scan_interface"


def _unsupported_reason(inputs: ScanInputs) -> str | None:
    if inputs.state_BEN is not None:
        return "the kernel supports no initial state"
    if inputs.documents_BL is not None:
        return "the kernel supports no document boundaries"
    if inputs.A_EN.shape[1] > 256:
        return f"the kernel supports a state size of at most 256, not {inputs.A_EN.shape[1]}"
    if inputs.x_BLE.dtype == torch.float64:
        return "the kernel does not support float64"
    return None


def _repeats_bits() -> bool:
    """Return False, since the backward pass uses atomic additions even in torch's deterministic mode."""
    return False


def mamba_ssm(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run the package's kernel from a zero state; return y in x's dtype, and the last state in fp32."""
    x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, D_E, dt_bias_E, z_BLE, _, _ = inputs
    wide = wide_type(x_BLE)
    per_token = [t for t in (x_BLE, dt_BLE, B_BLN, C_BLN, z_BLE) if t is not None]
    shared = functools.reduce(torch.promote_types, (t.dtype for t in per_token))  # the kernel requires a single dtype
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
    return y_BEL.transpose(1, 2).to(x_BLE.dtype), _LastState.apply(last_BEN, x_BLE, dt_BLE, A_EN, B_BLN, dt_bias_E)


MAMBA_SSM = Implementation("mamba-ssm", mamba_ssm, "cuda", PACKAGE, _unsupported_reason, _repeats_bits)


class _LastState(torch.autograd.Function):
    """Autograd function that returns the kernel's last state, and propagates the state's gradient to the scan's inputs.

    `made_from` are these inputs. The gradient is rarely needed, since states are mostly detached between rows. If it is
    needed, `chunked` computes the state again, and autograd differentiates it.
    """

    @staticmethod
    def forward(ctx: Any, last_BEN: Tensor, *made_from: Tensor) -> Tensor:
        ctx.save_for_backward(*made_from)
        return last_BEN.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BEN: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            x_BLE, dt_BLE, A_EN, B_BLN, dt_bias_E = leaves
            # C and D affect only y, so their values do not matter
            no_D = torch.zeros_like(A_EN[:, 0])
            C_BLN = B_BLN.detach()
            _, last_BEN = chunked(ScanInputs(x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, no_D, dt_bias_E))
        return None, *torch.autograd.grad(last_BEN, leaves, grad_BEN)
