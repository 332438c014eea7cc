"""Mamba-2 (equations in `architecture/mamba2.py`): projections around causal convolutions, SSD and a gated norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.mixers.sparse import SparseBranch, projected_heads
from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.gated_norm import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    gated_norm,
    gated_scale,
    gated_squares,
)
from hybridtron.ops.halves import halves
from hybridtron.ops.multiply import multiply
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.ops.transition import ssd_transition
from hybridtron.parallel.context import contiguous_inputs, halo_tokens, sharded_scan
from hybridtron.parallel.linear import (
    SplitProjection,
    TensorGroup,
    all_reduce_sum,
    column_parallel,
    project_all,
    row_parallel,
    row_parallel_inside,
)


class Mamba2(Mixer):
    """Mamba-2, with a sparse attention branch if the spec has one.

    State: `ssm` (B, H, P, N) in fp32; `x_conv` (B, W - 1, E) and `bc_conv` (B, W - 1, C), the convolutions' last
    inputs; and the sparse branch's state.

    Legend: B rows (sequences), L tokens, D width, W taps of a convolution, N state entries per channel. On this rank: E
    inner channels, H heads of P channels, G groups that these heads use, C output channels of `bc_proj`. For every
    group, `bc_proj` computes the scan's inputs B and C, with N channels each.
    """

    has_selective_steps = True

    def __init__(self, spec: Mamba2Spec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.spec = spec
        self.tensor = tensor
        inner = spec.inner(sizes)
        heads = spec.num_heads(sizes)
        self.inner, self.heads = tensor.share(inner), tensor.share(heads)
        self.whole_groups = spec.parameters(sizes)["bc_proj.weight"].cut_over("tensor", tensor.size) is None
        if self.whole_groups:
            self.groups_used = tensor.groups_used(heads, spec.groups)
        else:
            self.groups_used = slice(None)
        bc_channels = 2 * spec.groups * spec.state
        if self.whole_groups:
            own_bc_channels = bc_channels
        else:
            own_bc_channels = tensor.share(bc_channels)
        self.in_proj = column_parallel(sizes.width, 2 * inner + heads, tensor)
        self.bc_proj = column_parallel(sizes.width, bc_channels, tensor.whole() if self.whole_groups else tensor)
        self.x_conv_weight = nn.Parameter(torch.empty(self.inner, spec.conv))
        self.x_conv_bias = nn.Parameter(torch.empty(self.inner))
        self.bc_conv_weight = nn.Parameter(torch.empty(own_bc_channels, spec.conv))
        self.bc_conv_bias = nn.Parameter(torch.empty(own_bc_channels))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        # The step size is softplus(dt + dt_bias). `least_dt` is the inverse softplus of `dt_floor`: with a sum
        # dt + dt_bias below `least_dt`, the step size would be below `dt_floor`.
        if spec.dt_floor:
            self.least_dt = spec.dt_floor + math.log(-math.expm1(-spec.dt_floor))
        else:
            self.least_dt = -math.inf
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        if spec.norm:
            self.norm_weight = nn.Parameter(torch.empty(self.inner))
        self.out_proj = row_parallel(inner, sizes.width, tensor)
        if spec.sparse is not None:
            self.sparse = SparseBranch(spec.sparse, spec.state, self.inner, sizes, tensor)
            if spec.projects:
                self.sparse_qk = row_parallel_inside(inner, 2 * spec.state, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        new: State = {}
        in_parts = SplitProjection(self.in_proj, (self.inner, self.inner, self.heads))
        parts = self._multiplied(*project_all(x_LBD, self.tensor, in_parts, self.bc_proj))
        z_BLE, x_BLE, dt_BLH, bc_BLC = (part.transpose(0, 1) for part in parts)
        before = state or {}
        documents_BL = seq.documents_BL
        width = self.spec.conv - 1
        tails = [
            halo_tokens(x_BLC, width, before.get(name), seq) for x_BLC, name in ((x_BLE, "x_conv"), (bc_BLC, "bc_conv"))
        ]
        x_conv = ConvInputs(x_BLE, self.x_conv_weight, self.x_conv_bias, tails[0], documents_BL, activation=True)
        bc_conv = ConvInputs(bc_BLC, self.bc_conv_weight, self.bc_conv_bias, tails[1], documents_BL, activation=True)
        x_BLE = causal_conv(x_conv)
        bc_BLC = causal_conv(bc_conv)
        if seq.carried:
            new["x_conv"] = next_tail(x_conv)
            new["bc_conv"] = next_tail(bc_conv)
        x_BLHP = x_BLE.unflatten(-1, (self.heads, -1))
        B_BLGN, C_BLGN = (part.unflatten(-1, (-1, self.spec.state))[:, :, self.groups_used] for part in halves(bc_BLC))
        A_H = -torch.exp(self.A_log)
        if self.spec.dt_floor:
            dt_BLH = torch.maximum(dt_BLH, (self.least_dt - self.dt_bias).to(dt_BLH.dtype))
        inputs = SSDInputs(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, self.D, self.dt_bias, documents_BL=documents_BL)
        inputs = contiguous_inputs(inputs, seq)
        y_BLHP, new["ssm"] = sharded_scan(
            lambda h_BHPN: ssd_scan(inputs._replace(state_BHPN=h_BHPN)), before.get("ssm"), seq,
            lambda: ssd_transition(inputs),
        )  # fmt: skip
        aux: dict[str, Tensor] = {}
        if self.spec.sparse is not None:
            shared = B_BLGN, C_BLGN, x_BLE
            if self.spec.projects:
                k_q_v = projected_heads(self.sparse_qk, x_BLE, self.tensor)
            else:
                k_q_v = shared
            attended_BLE, sparse_state, aux = self.sparse(*k_q_v, before, seq)
            y_BLHP = y_BLHP + attended_BLE.view_as(y_BLHP)
            new = new | sparse_state
        if self.spec.norm:
            y_BLE = self._normed(y_BLHP, z_BLE)
        else:
            y_BLE = gated_alone(y_BLHP, z_BLE)
        return MixerOutput(self.out_proj(y_BLE.transpose(0, 1)), new, aux)

    def _multiplied(self, z_LBE: Tensor, x_LBE: Tensor, dt_LBH: Tensor, bc_LBC: Tensor) -> tuple[Tensor, ...]:
        """Scale the projections by the spec's multipliers."""
        scales = self.spec.multipliers
        if scales.B == scales.C:
            bc_LBC = multiply(bc_LBC, scales.B)
        else:
            B_LBC, C_LBC = bc_LBC.chunk(2, dim=-1)
            bc_LBC = torch.cat((multiply(B_LBC, scales.B), multiply(C_LBC, scales.C)), dim=-1)
        return multiply(z_LBE, scales.z), multiply(x_LBE, scales.x), multiply(dt_LBH, scales.dt), bc_LBC

    def _normed(self, y_BLHP: Tensor, z_BLE: Tensor) -> Tensor:
        """Apply the gated norm.

        The norm is over a group's channels. If the groups can't be divided over the ranks, every rank computes B and C
        of all groups, and a group's heads may be on several ranks. So the ranks all-reduce each group's sum of squares.
        """
        if self.whole_groups and self.tensor.size > 1:
            return self._normed_over_ranks(y_BLHP, z_BLE.unflatten(-1, (self.heads, -1))).flatten(2)
        groups = self.spec.groups // self.tensor.size
        return gated_norm(GatedNormInputs(y_BLHP.flatten(2), z_BLE, self.norm_weight, groups, self.spec.norm_eps))

    def _normed_over_ranks(self, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        """Apply the gated norm: sum each group's squares over its heads on all ranks, then scale this rank's heads."""
        spec = self.spec
        groups = self.spec.groups
        heads = self.heads * self.tensor.size
        squares_BLH = gated_squares(GatedSquaresInputs(y_BLHP, z_BLHP))
        head_H = torch.arange(self.heads, device=y_BLHP.device) + self.tensor.rank * self.heads
        group_HG = head_H.unsqueeze(1) * groups // heads == torch.arange(groups, device=y_BLHP.device)
        group_HG = group_HG.to(squares_BLH.dtype)
        mean_BLG = all_reduce_sum(squares_BLH @ group_HG, self.tensor) / (heads // groups * spec.head_dim)
        scale_BLH = torch.rsqrt(mean_BLG + spec.norm_eps) @ group_HG.T
        weight_HP = self.norm_weight.unflatten(0, (self.heads, -1))
        return gated_scale(GatedScaleInputs(y_BLHP, z_BLHP, scale_BLH, weight_HP))


def gated_alone(y_BLHP: Tensor, z_BLE: Tensor) -> Tensor:
    """Return y * silu(z), computed by the op `gated_scale` with factors and weights that are all 1."""
    ones_BLH = torch.ones(y_BLHP.shape[:3], dtype=wide_type(y_BLHP), device=y_BLHP.device)
    z_BLHP = z_BLE.unflatten(-1, y_BLHP.shape[2:])
    return gated_scale(GatedScaleInputs(y_BLHP, z_BLHP, ones_BLH, y_BLHP.new_ones(y_BLHP.shape[2:]))).flatten(2)
