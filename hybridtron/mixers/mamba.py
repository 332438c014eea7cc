"""The Mamba-1 mixer (equations in `specs/mamba.py`): projections around a causal convolution and a selective scan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.ops.conv1d import causal_conv
from hybridtron.ops.scan import selective_scan
from hybridtron.parallel.linear import column_parallel, row_parallel
from hybridtron.specs.base import ModelSizes
from hybridtron.specs.mamba import MambaSpec


class Mamba(Mixer):
    """State: `ssm` (B, E, N) in fp32, and `conv` (B, W - 1, E), the inputs that the next chunk's convolution needs."""

    def __init__(self, spec: MambaSpec, sizes: ModelSizes) -> None:
        super().__init__()
        self.inner, self.state, self.rank = spec.inner(sizes), spec.state, spec.rank(sizes)
        self.in_proj = column_parallel(sizes.width, 2 * self.inner)
        self.conv_weight = nn.Parameter(torch.empty(self.inner, spec.conv))
        self.conv_bias = nn.Parameter(torch.empty(self.inner))
        self.x_proj = row_parallel(self.inner, self.rank + 2 * self.state)
        self.dt_proj = column_parallel(self.rank, self.inner)
        self.dt_bias = nn.Parameter(torch.empty(self.inner))
        self.A_log = nn.Parameter(torch.empty(self.inner, self.state))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.out_proj = row_parallel(self.inner, sizes.width)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        x_BLE, z_BLE = self.in_proj(x_LBD).transpose(0, 1).chunk(2, dim=-1)
        tail = None if state is None else state["conv"]
        x_BLE, tail = causal_conv(x_BLE, self.conv_weight, self.conv_bias, tail, seq.documents_BL, True)
        dt_BLR, B_BLN, C_BLN = self.x_proj(x_BLE).split((self.rank, self.state, self.state), dim=-1)
        dt_BLE = self.dt_proj(dt_BLR)
        A_EN = -torch.exp(self.A_log)
        h_BEN = None if state is None else state["ssm"]
        y_BLE, h_BEN = selective_scan(
            x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, self.D, z_BLE, self.dt_bias, h_BEN, seq.documents_BL
        )
        return Out(self.out_proj(y_BLE.transpose(0, 1)), {"ssm": h_BEN, "conv": tail}, {})
