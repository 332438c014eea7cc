"""Mamba-1 (equations in `architecture/mamba.py`): projections around a causal convolution and a selective scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State, as_stored, beside_as_stored
from hybridtron.mixers.sparse import SparseBranch, projected_heads
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.transition import scan_transition
from hybridtron.parallel.context import scan_from, tokens_before
from hybridtron.parallel.linear import (
    InParts,
    TensorGroup,
    column_parallel,
    projected,
    row_parallel,
    row_parallel_inside,
    sum_gradients,
)


class Mamba(Mixer):
    """Mamba-1, with a sparse attention branch if the spec has one.

    State: `ssm` (B, E, N) in fp32, and `conv` (B, W - 1, E), the convolution's last inputs; and the sparse branch's
    state.
    """

    selects = True

    def __init__(self, spec: MambaSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.spec = spec
        self.tensor = tensor
        inner, self.state, self.rank = spec.inner(sizes), spec.state, spec.rank(sizes)
        channels = tensor.share(inner)
        self.in_proj = column_parallel(sizes.width, 2 * inner, tensor)
        self.conv_weight = nn.Parameter(torch.empty(channels, spec.conv))
        self.conv_bias = nn.Parameter(torch.empty(channels))
        self.x_proj = row_parallel_inside(inner, self.rank + 2 * self.state, tensor)
        self.dt_proj = column_parallel(self.rank, inner, tensor.without_fp8())
        self.dt_bias = nn.Parameter(torch.empty(channels))
        self.A_log = nn.Parameter(torch.empty(channels, self.state))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = row_parallel(inner, sizes.width, tensor)
        if spec.sparse is not None:
            self.sparse = SparseBranch(spec.sparse, spec.state, channels, sizes, tensor)
            if spec.projects:
                self.sparse_qk = row_parallel_inside(inner, 2 * spec.state, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        parts = projected(x_LBD, self.tensor, InParts(self.in_proj, (len(self.D), len(self.D))))
        x_BLE, z_BLE = (part.transpose(0, 1) for part in parts)
        before = state or {}
        tail = tokens_before(x_BLE, self.spec.conv - 1, before.get("conv"), seq)
        x_BLE, tail = causal_conv(
            ConvInputs(x_BLE, self.conv_weight, self.conv_bias, tail, seq.documents_BL, activation=True)
        )
        # every rank has the full dt, B and C, and uses them for its own channels
        x_BLE, dt_B_C = beside_as_stored(self.x_proj, x_BLE)
        dt_B_C = sum_gradients(dt_B_C, self.tensor)
        dt_BLR, B_BLN, C_BLN = dt_B_C.split((self.rank, self.state, self.state), dim=-1)
        dt_BLE = as_stored(self.dt_proj, dt_BLR)
        A_EN = -torch.exp(self.A_log)
        inputs = ScanInputs(
            x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, self.D, self.dt_bias, z_BLE, documents_BL=seq.documents_BL
        )
        y_BLE, h_BEN = scan_from(
            lambda h_BEN: selective_scan(inputs._replace(state_BEN=h_BEN)), before.get("ssm"), seq,
            lambda: scan_transition(inputs),
        )  # fmt: skip
        new = {"ssm": h_BEN, "conv": tail}
        aux = {}
        if self.spec.sparse is not None:
            shared = B_BLN.unsqueeze(2), C_BLN.unsqueeze(2), x_BLE
            if self.spec.projects:
                k_q_v = projected_heads(self.sparse_qk, x_BLE, self.tensor)
            else:
                k_q_v = shared
            attended_BLE, sparse_state, aux = self.sparse(*k_q_v, before, seq)
            y_BLE = y_BLE + attended_BLE * F.silu(z_BLE)
            new = new | sparse_state
        return Out(self.out_proj(y_BLE.transpose(0, 1)), new, aux)
