"""RWKV-6's channel mix (equations in `architecture/rwkv6_channel_mix.py`).

Its output is the elementwise product of two projections. `value` sums over the inner channels of all ranks, so each
rank receives by reduce-scatter the sums for its own output channels, the same that its `receptance` computes, and
`leave` exchanges the products. No rank repeats another's work, and no more is sent than by an all-reduce.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.rwkv6_channel_mix import RWKV6ChannelMixSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.mixers.token_shift import token_before
from hybridtron.parallel.linear import TensorGroup, column_parallel, enter, leave, row_parallel_by_channel


class RWKV6ChannelMix(Mixer):
    """RWKV-6's channel mix. State: `shift` (B, D), the last token."""

    def __init__(self, spec: RWKV6ChannelMixSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor, width, inner = tensor, sizes.width, spec.inner(sizes)
        self.key_mix = nn.Parameter(torch.empty(width))
        self.receptance_mix = nn.Parameter(torch.empty(width))
        self.key = column_parallel(width, inner, tensor)
        self.receptance = column_parallel(width, width, tensor)
        self.value = row_parallel_by_channel(inner, width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        x_LBD = enter(x_LBD, self.tensor)
        before_LBD, last_BD = token_before(x_LBD, (state or {}).get("shift"), seq)
        change_LBD = before_LBD - x_LBD
        k_LBE = self.key(torch.addcmul(x_LBD, change_LBD, self.key_mix))
        r_LBC = self.receptance(torch.addcmul(x_LBD, change_LBD, self.receptance_mix))
        value_LBC = self.value(F.relu(k_LBE).square())
        return Out(leave(torch.sigmoid(r_LBC) * value_LBC, self.tensor), {"shift": last_BD}, {})
