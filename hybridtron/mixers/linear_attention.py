"""Base class for linear attention mixers (`architecture/linear_attention.py`): projections, convolution, gated norm.

Subclasses implement `attend`, the recurrence.

Legend: B rows (sequences), L tokens, D width, K query heads and as many key heads, H value heads, N key channels per
head, P value channels per head, W taps of the convolution. E = K * N, V = H * P, C = 2 * E + V and T = W - 1: q and k
have E channels each, v has V channels, and q, k and v together have C. The convolution reads T tokens before a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.gated_norm import NormBeforeGateInputs, norm_before_gate
from hybridtron.parallel.context import halo_parts
from hybridtron.parallel.linear import SplitProjection, TensorGroup, column_parallel, project_all, row_parallel


class HeadInputs(NamedTuple):
    """Inputs to the recurrence of a rank's heads.

    others   the other projections of the mixer's input, in the order of `projected`, such as z and logits for decays
    q        queries, not scaled
    k        keys. Each of the K key heads serves H / K consecutive value heads
    v        values
    state    the heads' states before the row; None stands for zeros
    seq      the tokens' positions and documents
    """

    others: Sequence[Tensor]
    q_BLKN: Tensor
    k_BLKN: Tensor
    v_BLHP: Tensor
    state: Tensor | None
    seq: SeqInfo


class LinearAttention(Mixer):
    """Linear attention around a subclass's recurrence.

    Queries, keys and values are convolved separately, so that all three are contiguous for the recurrence's kernels.

    State: `ssm`, one matrix per head, in fp32; and `conv` (B, T, C), last inputs of the convolutions if there are any.
    """

    gate_is_sigmoid = False  # if False, SiLU is applied to the gate

    def __init__(self, shared: LinearAttentionSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.shared = shared
        self.tensor = tensor
        self.keys, self.values = (tensor.share(channels) for channels in shared.channels(sizes))
        self.heads, self.key_heads = tensor.share(shared.heads), tensor.share(shared.num_key_heads)
        self.scale = shared.head_sizes(sizes)[0] ** -0.5
        projected = shared.projected(sizes)
        self.in_proj = column_parallel(sizes.width, sum(size for _, size in projected), tensor)
        self.parts = [tensor.share(size) for _, size in projected]
        if shared.conv:
            self.conv_weight = nn.Parameter(torch.empty(2 * self.keys + self.values, shared.conv))
        self.norm_weight = nn.Parameter(torch.empty(shared.head_sizes(sizes)[1]))
        self.out_proj = row_parallel(shared.channels(sizes)[1], sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        before = state or {}
        new = State()
        q_LBE, k_LBE, v_LBV, *others = self.projected(x_LBD)
        q_BLE, k_BLE, v_BLV = (part.transpose(0, 1) for part in (q_LBE, k_LBE, v_LBV))
        if self.shared.conv:
            tails = halo_parts((q_BLE, k_BLE, v_BLV), self.shared.conv - 1, before.get("conv"), seq)
            inputs = self.conv_inputs((q_BLE, k_BLE, v_BLV), tails, seq)
            q_BLE, k_BLE, v_BLV = map(causal_conv, inputs)
            if seq.carried:
                new["conv"] = torch.cat([next_tail(part) for part in inputs], -1)
        q_BLKN = q_BLE.unflatten(-1, (self.key_heads, -1))
        k_BLKN = k_BLE.unflatten(-1, (self.key_heads, -1))
        v_BLHP = v_BLV.unflatten(-1, (self.heads, -1))
        y_BLHP, new["ssm"] = self.attend(HeadInputs(others, q_BLKN, k_BLKN, v_BLHP, before.get("ssm"), seq))
        z_BLHP = self.output_gate(others).transpose(0, 1).unflatten(-1, (self.heads, -1))
        gated = NormBeforeGateInputs(y_BLHP, z_BLHP, self.norm_weight, self.shared.norm_eps, self.gate_is_sigmoid)
        return MixerOutput(self.out_proj(norm_before_gate(gated).flatten(2).transpose(0, 1)), new, {})

    def projected(self, x_LBD: Tensor) -> list[Tensor]:
        """Return q, k and v, then z if in_proj computes it, then the outputs of `other_input_layers`.

        `SplitProjection` saves the kernels that concatenate the gradients of q, k, v and z. Without convolutions it
        would save nothing: the recurrence's gradients are row-major in memory, and in_proj needs token-major gradients.
        So they are copied in any case, and this copy also concatenates them.
        """
        others = self.other_input_layers()
        if self.shared.conv:
            return list(project_all(x_LBD, self.tensor, SplitProjection(self.in_proj, self.parts), *others))
        whole_LBC, *outputs = project_all(x_LBD, self.tensor, self.in_proj, *others)
        return [*whole_LBC.split(self.parts, -1), *outputs]

    def other_input_layers(self) -> Sequence[nn.Module]:
        """Return the layers other than in_proj that project the mixer's input."""
        return ()

    def output_gate(self, others: Sequence[Tensor]) -> Tensor:
        """Return z (L, B, V), whose SiLU or sigmoid multiplies the normed output."""
        return others[0]

    def conv_inputs(self, parts: Sequence[Tensor], tails: Sequence[Tensor | None], seq: SeqInfo) -> list[ConvInputs]:
        """Return the inputs of the three convolutions, for q, k and v, each with its rows of `conv_weight`."""
        weights = self.conv_weight.split((self.keys, self.keys, self.values))
        return [
            ConvInputs(part_BLC, weight_CW, None, tail_BTC, seq.documents_BL, activation=True, row_major=True)
            for part_BLC, weight_CW, tail_BTC in zip(parts, weights, tails, strict=True)
        ]

    @abstractmethod
    def attend(self, head_inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of this rank's heads (B, L, H, P), and the heads' states after the row."""
