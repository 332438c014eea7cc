"""Mamba-1 (equations in `architecture/mamba.py`): projections around a causal convolution and a selective scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State, apply_in_layout, apply_with_input_in_layout
from hybridtron.mixers.norm import PlainRMSNorm, RMSNorm
from hybridtron.mixers.sparse import SparseBranch, projected_heads
from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.transition import scan_transition
from hybridtron.parallel.context import halo_tokens, sharded_scan
from hybridtron.parallel.linear import (
    SplitProjection,
    TensorGroup,
    all_reduce_gradients,
    column_parallel,
    project_all,
    row_parallel,
    row_parallel_inside,
)


class Mamba(Mixer):
    """Mamba-1, with a sparse attention branch if the spec has one.

    State: `ssm` (B, E, N) in fp32; `conv` (B, W - 1, E), the convolution's last inputs; and the sparse branch's state.

    Legend: B rows (sequences), L tokens, D width, E inner channels on this rank, N state entries per channel, W taps of
    the convolution, R inner channels of the low-rank projection to dt (`dt_rank` in the spec).
    """

    has_selective_steps = True

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
        if spec.inner_norm == "learned":
            self.dt_norm = RMSNorm(self.rank, spec.norm_eps)
            self.B_norm = RMSNorm(self.state, spec.norm_eps)
            self.C_norm = RMSNorm(self.state, spec.norm_eps)
        elif spec.inner_norm == "plain":
            self.dt_norm = self.B_norm = self.C_norm = PlainRMSNorm(spec.norm_eps)
        if spec.sparse is not None:
            self.sparse = SparseBranch(spec.sparse, spec.state, channels, sizes, tensor)
            if spec.projects:
                self.sparse_qk = row_parallel_inside(inner, 2 * spec.state, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        parts = project_all(x_LBD, self.tensor, SplitProjection(self.in_proj, (len(self.D), len(self.D))))
        x_BLE, z_BLE = (part.transpose(0, 1) for part in parts)
        before = state or {}
        tail = halo_tokens(x_BLE, self.spec.conv - 1, before.get("conv"), seq)
        conv = ConvInputs(x_BLE, self.conv_weight, self.conv_bias, tail, seq.documents_BL, activation=True)
        x_BLE = causal_conv(conv)
        # Every rank has dt_BLR, B and C in full, but uses them for its own channels only. So the gradients of these
        # three tensors are partial sums, which the ranks all-reduce.
        x_BLE, dt_B_C = apply_with_input_in_layout(self.x_proj, x_BLE)
        dt_B_C = all_reduce_gradients(dt_B_C, self.tensor)
        dt_BLR, B_BLN, C_BLN = dt_B_C.split((self.rank, self.state, self.state), dim=-1)
        if self.spec.inner_norm != "none":
            dt_BLR = apply_in_layout(self.dt_norm, dt_BLR)
            B_BLN = apply_in_layout(self.B_norm, B_BLN)
            C_BLN = apply_in_layout(self.C_norm, C_BLN)
        dt_BLE = apply_in_layout(self.dt_proj, dt_BLR)
        A_EN = -torch.exp(self.A_log)
        inputs = ScanInputs(
            x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, self.D, self.dt_bias, z_BLE, documents_BL=seq.documents_BL
        )
        y_BLE, h_BEN = sharded_scan(
            lambda h_BEN: selective_scan(inputs._replace(state_BEN=h_BEN)), before.get("ssm"), seq,
            lambda: scan_transition(inputs),
        )  # fmt: skip
        new = {"ssm": h_BEN}
        if seq.carried:
            new["conv"] = next_tail(conv)
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
        return MixerOutput(self.out_proj(y_BLE.transpose(0, 1)), new, aux)
