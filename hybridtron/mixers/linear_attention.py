"""Base class for linear attention mixers (`architecture/linear_attention.py`): projections, convolution, gated norm.

Subclasses implement `attend`, the recurrence.

Legend: B rows (sequences), L tokens, D width, K query and key heads, H value heads, N key channels per head, P value
channels per head, E = K N, V = H P, C = 2 E + V channels of q, k and v, W taps, T = W - 1 tokens before a row.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.gated_norm import NormBeforeGateInputs, norm_before_gate
from hybridtron.parallel.context import halo_tokens
from hybridtron.parallel.linear import TensorGroup, column_parallel, gather_input, row_parallel


class HeadInputs(NamedTuple):
    """Inputs to the recurrence of a rank's heads.

    x        the mixer's input
    q        queries, not scaled
    k        keys. Each of the K key heads serves H / K consecutive value heads
    v        values
    state    the heads' states before the row; None stands for zeros
    seq      the tokens' positions and documents
    """

    x_LBD: Tensor
    q_BLKN: Tensor
    k_BLKN: Tensor
    v_BLHP: Tensor
    state: Tensor | None
    seq: SeqInfo


class LinearAttention(Mixer):
    """Linear attention around a subclass's recurrence.

    State: `ssm`, one matrix per head, in fp32; and `conv` (B, T, C) if there is a convolution.
    """

    gate_is_sigmoid = False  # if False, SiLU is applied to the gate

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

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        before = state or {}
        new = State()
        x_LBD = gather_input(x_LBD, self.tensor)
        qkv_LBC, z_LBV = self.projections(x_LBD)
        qkv_BLC = qkv_LBC.transpose(0, 1)
        if self.shared.conv:
            tail_BTC = halo_tokens(qkv_BLC, self.shared.conv - 1, before.get("conv"), seq)
            inputs = ConvInputs(qkv_BLC, self.conv_weight, None, tail_BTC, seq.documents_BL, activation=True)
            qkv_BLC = causal_conv(inputs)
            if seq.carried:
                new["conv"] = next_tail(inputs)
        q_BLE, k_BLE, v_BLV = qkv_BLC.split((self.keys, self.keys, self.values), dim=-1)
        q_BLKN, k_BLKN = (part.unflatten(-1, (self.key_heads, -1)) for part in (q_BLE, k_BLE))
        v_BLHP = v_BLV.unflatten(-1, (self.heads, -1))
        y_BLHP, new["ssm"] = self.attend(HeadInputs(x_LBD, q_BLKN, k_BLKN, v_BLHP, before.get("ssm"), seq))
        z_BLHP = z_LBV.transpose(0, 1).unflatten(-1, (self.heads, -1))
        gated = NormBeforeGateInputs(y_BLHP, z_BLHP, self.norm_weight, self.shared.norm_eps, self.gate_is_sigmoid)
        return MixerOutput(self.out_proj(norm_before_gate(gated).flatten(2).transpose(0, 1)), new, {})

    def projections(self, x_LBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k and v concatenated, and z, whose SiLU or sigmoid multiplies the normed output."""
        qkv_LBC, z_LBV = self.in_proj(x_LBD).split((2 * self.keys + self.values, self.values), dim=-1)
        return qkv_LBC, z_LBV

    @abstractmethod
    def attend(self, given: HeadInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of this rank's heads (B, L, H, P), and their states after the row."""
