"""Gated linear attention (equations in `architecture/gla.py`): projections around a recurrence with decays by key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.gla import GLASpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.precision import at_least_fp32
from hybridtron.parallel.linear import TensorGroup, column_parallel, enter, row_parallel


class GLA(Mixer):
    """State: `ssm` (B, H, N, P) in fp32; `conv` (B, W - 1, channels of q, k and v) where there is a convolution."""

    def __init__(self, spec: GLASpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.spec, self.tensor = spec, tensor
        keys, values = (tensor.share(channels) for channels in spec.channels(sizes))
        self.keys, self.values, self.heads = keys, values, tensor.share(spec.heads)
        self.scale = spec.head_sizes(sizes)[0] ** -0.5
        self.in_proj = column_parallel(sizes.width, 2 * sum(spec.channels(sizes)), tensor)
        self.gate_down = column_parallel(sizes.width, spec.gate_rank, tensor.whole().without_fp8())
        self.gate_up = column_parallel(spec.gate_rank, spec.channels(sizes)[0], tensor.without_fp8())
        self.gate_bias = nn.Parameter(torch.empty(keys))
        if spec.conv:
            self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, spec.conv))
        self.norm_weight = nn.Parameter(torch.empty(spec.head_sizes(sizes)[1]))
        self.out_proj = row_parallel(spec.channels(sizes)[1], sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        before, new = state or {}, State()
        x_LBD = enter(x_LBD, self.tensor)
        qkv_LBC, z_LBV = self.in_proj(x_LBD).split((2 * self.keys + self.values, self.values), dim=-1)
        qkv_BLC = qkv_LBC.transpose(0, 1)
        if self.spec.conv:
            given = ConvInputs(qkv_BLC, self.conv_weight, None, before.get("conv"), seq.documents_BL, activation=True)
            qkv_BLC, new["conv"] = causal_conv(given)
        parts = qkv_BLC.split((self.keys, self.keys, self.values), dim=-1)
        q_BLHN, k_BLHN, v_BLHP = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        g_BLHN = self.log_decays(x_LBD).transpose(0, 1).unflatten(-1, (self.heads, -1))
        y_BLHP, new["ssm"] = gla_scan(
            GLAInputs(q_BLHN * self.scale, k_BLHN, v_BLHP, g_BLHN, before.get("ssm"), seq.documents_BL)
        )
        normed_BLHP = rms_norm(RMSNormInputs(y_BLHP, self.norm_weight, self.spec.norm_eps))
        y_LBV = normed_BLHP.flatten(2).transpose(0, 1) * F.silu(z_LBV)
        return Out(self.out_proj(y_LBV), new, {})

    def log_decays(self, x_LBD: Tensor) -> Tensor:
        """g of this rank's key channels, in fp32: sums of many of them follow."""
        logits_LBK = at_least_fp32(self.gate_up(self.gate_down(x_LBD))) + self.gate_bias
        return F.logsigmoid(logits_LBK) / self.spec.gate_divisor
