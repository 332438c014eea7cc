"""The attention mixer (equations in `specs/attention.py`): full or sliding window, grouped queries, RoPE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.ops.attention import Memory, attention, remember
from hybridtron.ops.conv1d import causal_conv
from hybridtron.ops.norm_rope import apply_rope
from hybridtron.parallel.linear import column_parallel, row_parallel
from hybridtron.specs.attention import AttentionSpec
from hybridtron.specs.base import ModelSizes


class Attention(Mixer):
    """State: rotated `keys` and `values` of the tokens that later ones may see (B, M, G, K), of which the last
    `length` (B,) are real; and `conv` (B, W - 1, channels) where a short convolution is used."""

    def __init__(self, spec: AttentionSpec, sizes: ModelSizes) -> None:
        super().__init__()
        self.spec = spec
        self.head_dim = spec.head(sizes)
        queries, keys = spec.channels(sizes)
        self.split = (queries, keys, keys)
        self.qkv = column_parallel(sizes.width, sum(self.split))
        self.out = row_parallel(queries, sizes.width)
        if spec.conv:
            self.conv_weight = nn.Parameter(torch.empty(sum(self.split), spec.conv))

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        new: State = {}
        qkv_BLC = self.qkv(x_LBD).transpose(0, 1)
        if self.spec.conv:
            tail = None if state is None else state["conv"]
            qkv_BLC, new["conv"] = causal_conv(qkv_BLC, self.conv_weight, None, tail, seq.documents_BL, True)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv_BLC.split(self.split, dim=-1))
        if self.spec.rope_base is not None:
            cos, sin = seq.rope(self.head_dim, self.spec.rope_base)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        memory = None if state is None else Memory(state["keys"], state["values"], state["length"])
        y_BLHK = attention(q, k, v, self.spec.window, seq.documents_BL, memory)
        keep = None if self.spec.window is None else self.spec.window - 1
        new["keys"], new["values"], new["length"] = remember(memory, k, v, seq.documents_BL, keep)
        return Out(self.out(y_BLHK.flatten(2).transpose(0, 1)), new, {})
