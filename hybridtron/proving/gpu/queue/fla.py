"""Calls flash-linear-attention's kernels with our ops' inputs; no other file calls this package.

The package can compute gates and norms itself. This file does not use these options: the package gets our ops' inputs,
and 1 as scale.

With Triton before 3.7.1, gradients of the gated delta rule are wrong on Hopper GPUs, so the package refuses to compute
them. `delta` disables this refusal: only the time of the gradients is measured, and their values are not used.

Letters for shapes:

    B   sequences
    L   tokens
    H   heads
    G   in `delta`, decays per head; in `ssd`, head groups
    N   key channels per head, or state size
    P   value channels per head
    C   channels in the convolution
    W   width of the convolution
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtron.device import optional_package
from hybridtron.ops.conv import ConvInputs
from hybridtron.ops.delta import DeltaInputs
from hybridtron.ops.gated_norm import NormBeforeGateInputs
from hybridtron.ops.gla import GLAInputs
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import SSDInputs


def module(name: str) -> Any:
    """Return the package's module `fla.NAME`. Raises RuntimeError with the reason if it can't be imported."""
    package = optional_package(f"fla.{name}")
    if package.module is None:
        raise RuntimeError(f"fla.{name} is {package.reason}: pip install --no-deps fla-core einops")
    return package.module


def gla(inputs: GLAInputs) -> Tensor:
    q, k, v, g = inputs[:4]
    y_BLHP, _ = module("ops.gla").chunk_gla(q, k, v, g, scale=1.0)
    return y_BLHP


def rwkv6(inputs: GLAInputs, bonus_HN: Tensor) -> Tensor:
    """Compute RWKV-6's recurrence: gla_scan, with a bonus that weights the current token's own key and value."""
    r, k, v, w = inputs[:4]
    y_BLHP, _ = module("ops.rwkv6").chunk_rwkv6(r, k, v, w, bonus_HN.to(r.dtype), scale=1.0)
    return y_BLHP


def delta(inputs: DeltaInputs) -> Tensor:
    """Compute delta_scan: by Gated DeltaNet's kernels for decays per head, by KDA's kernels for decays per channel.

    g has log decays; its last axis has size 1 if decays are per head.
    """
    q, k, v, beta_BLH, g_BLHG = inputs[:5]
    beta_BLH = beta_BLH.to(v.dtype)
    if g_BLHG.shape[-1] > 1:
        return module("ops.kda").chunk_kda(q, k, v, g_BLHG, beta_BLH, scale=1.0)[0]
    module("ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    g_BLH = g_BLHG.squeeze(-1)
    return module("ops.gated_delta_rule").chunk_gated_delta_rule(q, k, v, g_BLH, beta_BLH, scale=1.0)[0]


def ssd(inputs: SSDInputs) -> Tensor:
    """Compute ssd_scan as gated linear attention with one decay per head.

    C, B and dt * x take the roles of queries, keys and values. A group's B and C are repeated for each head in the
    group.
    """
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, _, _ = inputs
    delta_BLH = step_sizes(dt_BLH, dt_bias_H)
    heads = x_BLHP.shape[2] // B_BLGN.shape[2]
    B_BLHN = B_BLGN.repeat_interleave(heads, dim=2)
    C_BLHN = C_BLGN.repeat_interleave(heads, dim=2)
    v_BLHP = (x_BLHP * delta_BLH.unsqueeze(3)).to(x_BLHP.dtype)
    y_BLHP, _ = module("ops.simple_gla").chunk_simple_gla(C_BLHN, B_BLHN, v_BLHP, delta_BLH * A_H, scale=1.0)
    return y_BLHP + D_H.to(x_BLHP.dtype)[:, None] * x_BLHP


def conv(inputs: ConvInputs) -> Tensor:
    x_BLC, weight_CW, bias_C = inputs[:3]
    y_BLC, _ = module("modules.causal_conv1d").causal_conv1d(x_BLC, weight_CW, bias_C, activation="silu")
    return y_BLC


def gated_rms_norm(inputs: NormBeforeGateInputs) -> Tensor:
    """Compute the norm before a gate, for which the package has one forward and one backward kernel."""
    y_BLHP, z_BLHP, weight_P, eps, _ = inputs
    norm = module("modules.norm.fused_norm_gate")
    return norm.rms_norm_gated(y_BLHP, z_BLHP, weight_P.to(torch.float32), None, eps=eps)
