"""RWKV-6's channel mix (equations in `architecture/rwkv6_channel_mix.py`).

The output is sigmoid(receptance) * value, an elementwise product. Under tensor parallelism, each rank has a shard of
the inner channels, so it computes a partial sum of `value` for all output channels. A reduce-scatter adds the partial
sums and gives each rank one range of output channels. For the same range the rank computes `receptance` and the
product, and `gather_output` all-gathers the products. So no rank repeats the matmuls of another rank, and the output
causes as much traffic as one all-reduce. The token shift is computed on every rank.

Legend: B rows (sequences), L tokens, D width. On this rank: E inner channels and C output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.rwkv6_channel_mix import RWKV6ChannelMixSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.mixers.token_shift import tokens_at_ends
from hybridtron.ops.squared_relu import SquaredReLUInputs, squared_relu
from hybridtron.ops.token_mix import TokenMixInputs, token_mix
from hybridtron.parallel.linear import (
    TensorGroup,
    column_parallel,
    gather_input,
    gather_output,
    row_parallel_by_channel,
)


class RWKV6ChannelMix(Mixer):
    """RWKV-6's channel mix. State: `shift` (B, D), the last token's input."""

    def __init__(self, spec: RWKV6ChannelMixSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor, width, inner = tensor, sizes.width, spec.inner(sizes)
        self.key_mix = nn.Parameter(torch.empty(width))
        self.receptance_mix = nn.Parameter(torch.empty(width))
        self.key = column_parallel(width, inner, tensor)
        self.receptance = column_parallel(width, width, tensor)
        self.value = row_parallel_by_channel(inner, width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        x_LBD = gather_input(x_LBD, self.tensor)
        first_BD, last_BD = tokens_at_ends(x_LBD, (state or {}).get("shift"), seq)
        mix_SD = torch.stack((self.key_mix, self.receptance_mix))
        key_LBD, receptance_LBD = token_mix(TokenMixInputs(x_LBD, mix_SD, None, first_BD, seq.documents_BL))
        k_LBE = self.key(key_LBD)
        r_LBC = self.receptance(receptance_LBD)
        value_LBC = self.value(squared_relu(SquaredReLUInputs(k_LBE)))
        return MixerOutput(gather_output(torch.sigmoid(r_LBC) * value_LBC, self.tensor), {"shift": last_BD}, {})
