"""Base class for linear attention mixers (`architecture/linear_attention.py`): projections, convolution, gated norm.

Subclasses implement `attend`, the recurrence over heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.parallel.context import tokens_before
from hybridtron.parallel.linear import TensorGroup, column_parallel, enter, row_parallel


class HeadInputs(NamedTuple):
    """Inputs for a rank's heads: the mixer's input, unscaled queries, keys and values, and the recurrent state.

    There are K heads for queries and keys, and H heads for values; each key head serves H / K consecutive value heads.
    """

    x_LBD: Tensor
    q_BLKN: Tensor
    k_BLKN: Tensor
    v_BLHP: Tensor
    state: Tensor | None
    seq: SeqInfo


class LinearAttention(Mixer):
    """Linear attention around a subclass's recurrence.

    State: `ssm`, one matrix per head, in fp32; and `conv` (B, W - 1, channels of q, k and v) if there is a convolution.
    """

    def __init__(self, shared: LinearAttentionSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.shared = shared
        self.tensor = tensor
        self.keys, self.values = (tensor.share(channels) for channels in shared.channels(sizes))
        self.heads, self.key_heads = tensor.share(shared.heads), tensor.share(shared.num_key_heads)
        self.scale = shared.head_sizes(sizes)[0] ** -0.5
        self.in_proj = column_parallel(sizes.width, sum(size for _, size in shared.projected(sizes)), tensor)
        if shared.conv:
            self.conv_weight = nn.Parameter(torch.empty(2 * self.keys + self.values, shared.conv))
        self.norm_weight = nn.Parameter(torch.empty(shared.head_sizes(sizes)[1]))
        self.out_proj = row_parallel(shared.channels(sizes)[1], sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        before = state or {}
        new = State()
        x_LBD = enter(x_LBD, self.tensor)
        qkv_LBC, gate_LBV = self.projections(x_LBD)
        qkv_BLC = qkv_LBC.transpose(0, 1)
        if self.shared.conv:
            tail_BTC = tokens_before(qkv_BLC, self.shared.conv - 1, before.get("conv"), seq)
            inputs = ConvInputs(qkv_BLC, self.conv_weight, None, tail_BTC, seq.documents_BL, activation=True)
            qkv_BLC, new["conv"] = causal_conv(inputs)
        q_BLE, k_BLE, v_BLV = qkv_BLC.split((self.keys, self.keys, self.values), dim=-1)
        q_BLKN, k_BLKN = (part.unflatten(-1, (self.key_heads, -1)) for part in (q_BLE, k_BLE))
        v_BLHP = v_BLV.unflatten(-1, (self.heads, -1))
        y_BLHP, new["ssm"] = self.attend(HeadInputs(x_LBD, q_BLKN, k_BLKN, v_BLHP, before.get("ssm"), seq))
        normed_BLHP = rms_norm(RMSNormInputs(y_BLHP, self.norm_weight, self.shared.norm_eps))
        return Out(self.out_proj(normed_BLHP.flatten(2).transpose(0, 1) * gate_LBV), new, {})

    def projections(self, x_LBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k and v concatenated, and the gate that multiplies the normed output."""
        qkv_LBC, z_LBV = self.in_proj(x_LBD).split((2 * self.keys + self.values, self.values), dim=-1)
        return qkv_LBC, F.silu(z_LBV)

    @abstractmethod
    def attend(self, given: HeadInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of this rank's heads (B, L, H, P), and their states after the row."""
