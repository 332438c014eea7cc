"""Mamba-3 (equations in `architecture/mamba3.py`), computed by one pass of Mamba-2's recurrence (SSD).

Step t goes from token t - 1 to token t. It has the size delta_t and the log decay delta_t A_t. The step adds x B^T from
both tokens to the state (the trapezoidal rule): from token t - 1 with the weight (1 - lambda_t) delta_t, and from token
t with the weight lambda_t delta_t, where lambda_t is between 0 and 1. So each token is added twice: first by the step
that ends at the token, then by the step that starts there. Later tokens see both addends with the same decay; the token
itself sees only the first addend. This file adds both addends to the state at once, and leaves the second addend out of
the token's own output:

    next_t = (1 - lambda_{t+1}) delta_{t+1}, or 0 if token t + 1 is in another document or row
    h_t = exp(delta_t A_t) h_{t-1} + (lambda_t delta_t + next_t) x_t B_t^T
    y_t = (exp(delta_t A_t) h_{t-1} + lambda_t delta_t x_t B_t^T) C_t + D x_t

next_t is not in the formula for y_t, so no token after t affects y_t, not even by rounding. If a row continues a
document, its first step starts at the previous row's last token. This step adds (1 - lambda_0) delta_0 x_{-1} B_{-1}^T
to the initial state.

Legend: B rows (sequences), L tokens, D width, E inner channels, H heads with P channels, G groups, N state entries per
channel, S rotated pairs of entries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba3 import Mamba3Spec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gated_norm import NormBeforeGateInputs, norm_before_gate
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.rotations import AngleInputs, TurnInputs, angles, turn_pairs, turned
from hybridtron.ops.ssd import DecayInputs, decay_scan
from hybridtron.ops.transition import decay_transition
from hybridtron.parallel.context import contiguous_inputs, halo_tokens, incoming_state, sharded_scan
from hybridtron.parallel.linear import TensorGroup, column_parallel, gather_input, row_parallel


class Mamba3(Mixer):
    """Mamba-3 in its variant with a single input and a single output (SISO).

    State: `ssm` (B, H, P, N) in fp32, rotated back to angle 0; `last_B` (B, H, N), the last token's B without rotation;
    and `last_x` (B, H, P), the last token's x.
    """

    def __init__(self, spec: Mamba3Spec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.spec = spec
        self.tensor = tensor
        inner = spec.inner(sizes)
        heads = spec.num_heads(sizes)
        self.inner, self.heads = tensor.share(inner), tensor.share(heads)
        whole_groups = spec.parameters(sizes)["bc_proj.weight"].cut_over("tensor", tensor.size) is None
        if whole_groups:
            self.groups_used = tensor.groups_used(heads, spec.groups)
        else:
            self.groups_used = slice(None)
        self.in_proj = column_parallel(sizes.width, 2 * inner + 3 * heads, tensor)
        bc_channels = 2 * spec.groups * spec.state
        self.bc_proj = column_parallel(sizes.width, bc_channels, tensor.whole() if whole_groups else tensor)
        self.angle_proj = column_parallel(sizes.width, spec.angles, tensor.whole().without_fp8())
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.B_bias = nn.Parameter(torch.empty(self.heads, 1, spec.state))
        self.C_bias = nn.Parameter(torch.empty(self.heads, 1, spec.state))
        self.B_norm_weight = nn.Parameter(torch.empty(spec.state))
        self.C_norm_weight = nn.Parameter(torch.empty(spec.state))
        self.D = nn.Parameter(torch.empty(self.heads))
        if spec.norm:
            self.norm_weight = nn.Parameter(torch.empty(self.inner))
        self.out_proj = row_parallel(inner, sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        x_LBD = gather_input(x_LBD, self.tensor)
        before = state or {}
        sizes = (self.inner, self.inner, self.heads, self.heads, self.heads)
        parts = self.in_proj(x_LBD).split(sizes, dim=-1)
        z_BLE, x_BLE, dt_BLH, a_BLH, trap_BLH = (part.transpose(0, 1) for part in parts)
        steps = trapezoid(at_least_fp32(dt_BLH) + self.dt_bias, at_least_fp32(a_BLH), at_least_fp32(trap_BLH))
        rates_BLS = math.pi * torch.tanh(at_least_fp32(self.angle_proj(x_LBD).transpose(0, 1)))
        turns = turns_of_row(angles(AngleInputs(steps.delta_BLH, rates_BLS, seq.documents_BL)), seq)
        B_BLGN, C_BLGN = self.normed_pair(x_LBD)
        x_BLHP = x_BLE.unflatten(-1, (self.heads, -1))
        y_BLHP, new = self.scan(x_BLHP, B_BLGN, C_BLGN, steps, turns, before, seq)
        if self.spec.norm:
            weight_HP = self.norm_weight.unflatten(0, (self.heads, -1))
            z_BLHP = z_BLE.unflatten(-1, (self.heads, -1))
            y_BLHP = norm_before_gate(NormBeforeGateInputs(y_BLHP, z_BLHP, weight_HP, self.spec.norm_eps))
            y_BLE = y_BLHP.flatten(2)
        else:
            y_BLE = y_BLHP.flatten(2) * F.silu(z_BLE)
        return MixerOutput(self.out_proj(y_BLE.transpose(0, 1)), new, {})

    def normed_pair(self, x_LBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed B and C of the groups that this rank's heads use."""
        eps = self.spec.norm_eps
        weights = (self.B_norm_weight, self.C_norm_weight)
        pair = self.bc_proj(x_LBD).transpose(0, 1).chunk(2, dim=-1)
        groups = (part.unflatten(-1, (-1, self.spec.state))[:, :, self.groups_used] for part in pair)
        B_BLGN, C_BLGN = (rms_norm(RMSNormInputs(x, w, eps)) for x, w in zip(groups, weights, strict=True))
        return B_BLGN, C_BLGN

    def scan(
        self,
        x_BLHP: Tensor,
        B_BLGN: Tensor,
        C_BLGN: Tensor,
        steps: Trapezoid,
        turns: Turns,
        before: State,
        seq: SeqInfo,
    ) -> tuple[Tensor, State]:
        """Return the outputs of this rank's heads (B, L, H, P), including D x, and the state parts after the row."""
        B_bias_HN = self.B_bias.squeeze(1)
        C_bias_HN = self.C_bias.squeeze(1)
        k_BLHN, q_BLHN = turn_pairs(TurnInputs(B_BLGN, C_BLGN, B_bias_HN, C_bias_HN, turns.angles_BLHS))
        step_BLH = steps.end_BLH + of_next_token(steps.start_BLH, seq.documents_BL)
        last_B = B_BLGN[:, -1].repeat_interleave(self.heads // B_BLGN.shape[2], dim=1) + B_bias_HN
        new = {"last_B": last_B.to(B_BLGN.dtype), "last_x": x_BLHP[:, -1]}
        first_BHPN = first_step(new, before, steps.start_BLH[:, 0], turns.begin_BHS, seq)
        inputs = DecayInputs(
            q_BLHN, k_BLHN, x_BLHP, steps.g_BLH, None, seq.documents_BL, step_BLH, steps.end_BLH, self.D
        )
        inputs = contiguous_inputs(inputs, seq)
        y_BLHP, last_BHPN = sharded_scan(
            lambda h_BHPN: decay_scan(inputs._replace(state_BHPN=summed(h_BHPN, first_BHPN))), before.get("ssm"), seq,
            lambda: decay_transition(inputs),
        )  # fmt: skip
        back_BH1S = -turns.angles_BLHS[:, -1].unsqueeze(2)
        return y_BLHP, {"ssm": turned(last_BHPN, back_BH1S), **new}


class Trapezoid(NamedTuple):
    """The trapezoidal step that ends at each token, for each head, in fp32.

    delta    the step's size
    g        the state's log decay
    end      weight for x B^T at the token where the step ends
    start    weight for x B^T at the previous token, where the step starts
    """

    delta_BLH: Tensor
    g_BLH: Tensor
    end_BLH: Tensor
    start_BLH: Tensor


def trapezoid(dt_BLH: Tensor, a_BLH: Tensor, trap_BLH: Tensor) -> Trapezoid:
    """Compute the trapezoidal steps from the projections dt, a and trap; `dt_BLH` includes dt_bias."""
    delta_BLH = F.softplus(dt_BLH)
    A_BLH = -torch.where(a_BLH >= 0, 1 + a_BLH, 1 / (1 + a_BLH.abs()))
    end_BLH = delta_BLH * torch.sigmoid(trap_BLH)
    start_BLH = delta_BLH * torch.sigmoid(-trap_BLH)
    return Trapezoid(delta_BLH, delta_BLH * A_BLH, end_BLH, start_BLH)


def of_next_token(x_BLH: Tensor, documents_BL: Tensor | None) -> Tensor:
    """Return the value of x at each token's successor, or zero if the successor is in another document or row."""
    next_BLH = F.pad(x_BLH[:, 1:], (0, 0, 0, 1))
    starts_BL = document_starts(documents_BL)
    if starts_BL is None:
        return next_BLH
    return next_BLH.masked_fill(F.pad(starts_BL[:, 1:], (0, 1)).unsqueeze(2), 0)


class Turns(NamedTuple):
    """Rotation angles for every token, accumulated from the start of its row or document.

    Under context parallelism, a rank holds a sequence shard: consecutive tokens in each row. `begin_BHS` then has the
    angles for the token before the shard; they are zero if that token belongs to another document or row. Without
    context parallelism `begin_BHS` is None.
    """

    angles_BLHS: Tensor
    begin_BHS: Tensor | None = None


def turns_of_row(angles_BLHS: Tensor, seq: SeqInfo) -> Turns:
    """Return the angles for this rank's tokens.

    The first document of a sequence shard continues from the angles at the end of the previous shard.
    """
    if seq.shard is None:
        return Turns(angles_BLHS)
    last_BHS = angles_BLHS[:, -1]
    begin_BHS = incoming_state(last_BHS, None, None, seq.shard)
    added_BLHS = begin_BHS.unsqueeze(1)
    if seq.documents_BL is not None:
        is_first_BL = seq.documents_BL == seq.documents_BL[:, :1]
        added_BLHS = torch.where(is_first_BL[:, :, None, None], added_BLHS, 0)
    return Turns(angles_BLHS + added_BLHS, begin_BHS)


def first_step(new: State, before: State, start_BH: Tensor, begin_BHS: Tensor | None, seq: SeqInfo) -> Tensor | None:
    """Return the term x B^T that the token before this row or shard adds to the initial state.

    `start_BH` is the term's weight. Before a row, x and B of that token come from the carried state `before`. Before a
    sequence shard, they come from the rank with the previous shard; `new` holds x and B of this shard's last token, to
    be sent to the next shard. Returns None if no token precedes.
    """
    x_B1HP, B_B1HN = (
        halo_tokens(new[name].unsqueeze(1), 1, before[name].unsqueeze(1) if name in before else None, seq)
        for name in ("last_x", "last_B")
    )
    if x_B1HP is None or B_B1HN is None:
        return None
    x_BHP, B_BHN = (token.squeeze(1).to(start_BH.dtype) for token in (x_B1HP, B_B1HN))
    B_BH1N = B_BHN.unsqueeze(2)
    if begin_BHS is not None:
        B_BH1N = turned(B_BH1N, begin_BHS.unsqueeze(2))
    return (start_BH.unsqueeze(2) * x_BHP).unsqueeze(3) * B_BH1N


def summed(h_BHPN: Tensor | None, added_BHPN: Tensor | None) -> Tensor | None:
    """Return the sum of the terms that are not None, or None if both terms are None."""
    if h_BHPN is None or added_BHPN is None:
        if h_BHPN is None:
            return added_BHPN
        return h_BHPN
    return added_BHPN + h_BHPN
