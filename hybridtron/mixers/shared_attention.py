"""Attention and MLP whose weights several sub-layers share (equations in `architecture/shared_attention.py`).

Every sub-layer builds the full module, with all weights. Then `model/shared.py` makes every sub-layer use the shared
layers of the first sub-layer with its letter. So the code here does not depend on which weights are shared.

Legend: B rows (sequences), L tokens, D width (in the input, twice the model's width; otherwise the model's width), C
channels in all heads, F channels of gate and up together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.shared_attention import SharedBlockSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.attention import Attention, Heads
from hybridtron.mixers.base import MixerOutput, State
from hybridtron.mixers.norm import RMSNorm
from hybridtron.mixers.span import SpanAttention
from hybridtron.ops.geglu import GEGLUInputs, geglu
from hybridtron.parallel.linear import (
    TensorGroup,
    column_parallel,
    gather_input,
    project_all,
    row_parallel,
    row_parallel_by_channel,
)


class SharedBlock(Heads):
    """Base class for `SharedAttention` and `SharedSpan`: norms, low-rank pairs A and B, and MLP around `Heads`.

    The input x_LBD is the residual stream concatenated with the embedding.
    """

    def __init__(self, spec: Any, sizes: ModelSizes, tensor: TensorGroup) -> None:
        tensor = tensor.without_fp8()
        super().__init__(spec, sizes, tensor)
        block: SharedBlockSpec = spec
        self.adapts_attention = block.adapt_attention
        width = sizes.width
        in_width = block.input_width(sizes)
        rank = block.rank
        whole = tensor.whole()
        self.in_norm, self.mlp_norm = RMSNorm(in_width, block.norm_eps), RMSNorm(width, block.norm_eps)
        self.gate_up = column_parallel(width, 2 * block.hidden, tensor)
        # `down` reduce-scatters its output by channels: each rank gets the channels that its shard of `linear` reads
        self.down = row_parallel_by_channel(block.hidden, width, tensor)
        self.linear = row_parallel(width, width, tensor)
        self.gate_up_A = column_parallel(width, rank, whole)
        self.gate_up_B = column_parallel(rank, 2 * block.hidden, tensor)
        if block.adapt_attention:
            queries, keys = block.channels(sizes)
            self.q_A, self.k_A, self.v_A = (column_parallel(in_width, rank, whole) for _ in range(3))
            self.q_B = column_parallel(rank, queries, tensor)
            self.k_B, self.v_B = (column_parallel(rank, keys, self.keys_over) for _ in range(2))

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        attended = super().forward(self.in_norm(x_LBD), state, seq)
        h_LBD = gather_input(self.mlp_norm(attended.y_LBD), self.tensor)
        gate_up_LBF = self.gate_up(h_LBD) + self.gate_up_B(self.gate_up_A(h_LBD))
        return attended._replace(y_LBD=self.linear(self.down(geglu(GEGLUInputs(gate_up_LBF)))))

    def project(self, x_LBD: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        if not self.adapts_attention:
            return super().project(x_LBD, parts)
        x_LBD = gather_input(x_LBD, self.tensor)
        q_LBC, *kv_LBC = project_all(x_LBD, self.tensor.whole(), *self.input_layers(parts))
        pairs = ((self.q_A, self.q_B), (self.k_A, self.k_B), (self.v_A, self.v_B))
        added = [B(A(x_LBD)) for A, B in pairs]
        return [q_LBC + added[0], kv_LBC[0] + added[1], kv_LBC[1] + added[2], *kv_LBC[2:]]


class SharedAttention(SharedBlock, Attention):
    """Shared block with causal attention; its state is that of `Attention`."""


class SharedSpan(SharedBlock, SpanAttention):
    """Shared block with span-expanded attention; its state is that of `SpanAttention`."""
