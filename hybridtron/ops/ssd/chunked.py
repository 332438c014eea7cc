"""SSD in torch alone: matrix multiplications over chunks of tokens, with its own backward pass.

`decay.DecayChunk` computes one chunk of the recurrence h_t = exp(g_t) h_{t-1} + k_t v_t^T, y_t = h_t^T q_t. For
`ssd_scan`, q = C, k = B, v = delta x, g = delta A, delta = softplus(dt + dt_bias), and D x is added to y. Let d before
a name denote that tensor's gradient. The gradients of the op's inputs follow from dv and dg:

    ddelta = (sum over a head's channels of x dv) + A dg,   ddt = ddelta sigmoid(dt + dt_bias)
    dx = delta dv + D dy,                                   dD = x dy summed over tokens and a head's channels
    dA = delta dg summed over tokens,                       ddt_bias = ddt summed over tokens

The inputs of `decay_scan` contain the decays g, and two factors for each token: later tokens see the token with the
factor `step`, and the token sees itself with the factor `own_step`.

Legend: B rows (sequences in a batch), L tokens, T tokens per chunk, H heads, P head size, G head groups that share
q and k, R heads per group, N state size, V = R * P. States are (B, H, P, N) in the op's inputs and outputs. Inside they
are (B, G, N, V): a group's heads are concatenated, so that one multiplication with k or q is enough for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.chunks import scan_chunks
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.decay import DecayChunk, VisibilityMask
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs, decay_scan, initial_state, ssd_scan

CHUNK = 128  # tokens per chunk


@untraced  # torch.compile would trace the loop over chunks for minutes, and gain nothing
def chunked(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """Return `ssd_scan`'s y and final state; the backward pass recomputes each chunk's intermediate tensors."""
    if inputs.x_BLHP.shape[1] <= 1:  # a single token, as in decoding
        return ssd_scan(inputs)
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL = inputs
    row = SSDChunkedRow(x_BLHP, dt_BLH, B_BLGN, C_BLGN, A_H, D_H, dt_bias_H, document_starts(documents_BL))
    return _over_chunks(row, initial_state(x_BLHP, B_BLGN, state_BHPN))


@untraced
def chunked_decay(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    """Return `decay_scan`'s y and final state; the backward pass recomputes each chunk's intermediate tensors."""
    if inputs.v_BLHP.shape[1] <= 1:
        return decay_scan(inputs)
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL, step_BLH, own_step_BLH, D_H = inputs
    row = DecayChunkedRow(v_BLHP, g_BLH, k_BLGN, q_BLGN, step_BLH, own_step_BLH, D_H, document_starts(documents_BL))
    return _over_chunks(row, initial_state(v_BLHP, k_BLGN, state_BHPN))


CHUNKED = Implementation("chunked", chunked)
CHUNKED_DECAY = Implementation("chunked", chunked_decay)


def _over_chunks(row: SSDChunkedRow | DecayChunkedRow, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """Scan all chunks with states (B, G, N, V); return y, and the last state as (B, H, P, N)."""
    groups = row[2].shape[2]
    state_BGRPN = state_BHPN.unflatten(1, (groups, -1))
    state_BGNV = state_BGRPN.permute(0, 1, 4, 2, 3).flatten(3)
    y_BLHP, last_BGNV = scan_chunks(row, CHUNK, state_BGNV)
    last_BGNRP = last_BGNV.unflatten(3, state_BGRPN.shape[2:4])
    return y_BLHP, last_BGNRP.permute(0, 1, 3, 4, 2).flatten(1, 2)


class SSDChunkedRow(NamedTuple):
    """The inputs to `ssd_scan` without the state: per-token tensors, then parameters (`hybridtron.ops.chunks`)."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 3

    def chunk(self, tokens: slice) -> DiscreteChunk:
        """Return consecutive tokens as a chunk, in fp32 or float64."""
        wide = wide_type(self.x_BLHP)
        groups = self.B_BLGN.shape[2]
        x_BTHP = self.x_BLHP[:, tokens].to(wide)
        shifted_BTH = self.dt_BLH[:, tokens].to(wide) + self.dt_bias_H.to(wide)
        delta_BTH = F.softplus(shifted_BTH)
        A_H = self.A_H.to(wide)
        D_H = self.D_H.to(wide)
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        core = DecayChunk(
            self.C_BLGN[:, tokens].to(wide).transpose(1, 2),
            self.B_BLGN[:, tokens].to(wide).transpose(1, 2),
            _grouped(x_BTHP * delta_BTH.unsqueeze(3), groups),
            (delta_BTH.double() * A_H.double()).transpose(1, 2).unflatten(1, (groups, -1)),
            VisibilityMask.of(x_BTHP.shape[1], x_BTHP.device, starts_BT),
        )
        return DiscreteChunk(x_BTHP, shifted_BTH, delta_BTH, A_H, D_H, core)


@dataclass
class DiscreteChunk:
    """T tokens of `ssd_scan` in fp32 or float64, and the recurrence over v = delta x and g = delta A (`core`)."""

    x_BTHP: Tensor
    shifted_BTH: Tensor  # dt + dt_bias
    delta_BTH: Tensor
    A_H: Tensor
    D_H: Tensor
    core: DecayChunk

    def forward(self, state_BGNV: Tensor) -> tuple[Tensor, Tensor]:
        """Return C h + D x, and the state after the chunk."""
        y_BTHP = self.core.outputs(state_BGNV).transpose(1, 2).reshape(self.x_BTHP.shape)
        return y_BTHP.addcmul_(self.D_H.unsqueeze(1), self.x_BTHP), self.core.next_state(state_BGNV)

    def backward(
        self, state_BGNV: Tensor, grad_y_BTHP: Tensor, grad_state_BGNV: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients of (x, dt, B, C), (A, D, dt_bias) and the state before the chunk."""
        grad_y_BGTV = _grouped(grad_y_BTHP, state_BGNV.shape[1])
        of = self.core.backward(state_BGNV, grad_y_BGTV, grad_state_BGNV)
        grad_v_BTHP = of.v_BGTV.transpose(1, 2).reshape(self.x_BTHP.shape)
        grad_g_BTH = of.g_BGRT.flatten(1, 2).transpose(1, 2)
        grad_delta_BTH = (grad_v_BTHP * self.x_BTHP).sum(-1) + grad_g_BTH * self.A_H
        grad_dt_BTH = grad_delta_BTH * torch.sigmoid(self.shifted_BTH)
        grad_x_BTHP = (grad_v_BTHP * self.delta_BTH.unsqueeze(3)).addcmul_(self.D_H.unsqueeze(1), grad_y_BTHP)
        of_tokens = grad_x_BTHP, grad_dt_BTH, of.k_BGTN.transpose(1, 2), of.q_BGTN.transpose(1, 2)
        of_parameters = (
            (grad_g_BTH * self.delta_BTH).sum((0, 1)),
            (grad_y_BTHP * self.x_BTHP).sum((0, 1, 3)),
            grad_dt_BTH.sum((0, 1)),
        )
        return of_tokens, tuple(grad.double() for grad in of_parameters), of.state_BGNV


class DecayChunkedRow(NamedTuple):
    """The inputs to `decay_scan` without the state: per-token tensors, then parameters (`hybridtron.ops.chunks`)."""

    v_BLHP: Tensor
    g_BLH: Tensor
    k_BLGN: Tensor
    q_BLGN: Tensor
    step_BLH: Tensor | None
    own_step_BLH: Tensor | None
    D_H: Tensor | None
    starts_BL: Tensor | None

    PARAMETERS = 1

    def chunk(self, tokens: slice) -> SSDChunk:
        """Return consecutive tokens as a chunk, in fp32 or float64."""
        wide = wide_type(self.v_BLHP)
        groups = self.k_BLGN.shape[2]
        v_BTHP = self.v_BLHP[:, tokens].to(wide)
        step_BTH1, own_step_BTH1 = (
            None if step_BLH is None else step_BLH[:, tokens].to(wide).unsqueeze(3)
            for step_BLH in (self.step_BLH, self.own_step_BLH)
        )
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        core = DecayChunk(
            self.q_BLGN[:, tokens].to(wide).transpose(1, 2),
            self.k_BLGN[:, tokens].to(wide).transpose(1, 2),
            _grouped(v_BTHP if step_BTH1 is None else step_BTH1 * v_BTHP, groups),
            self.g_BLH[:, tokens].transpose(1, 2).unflatten(1, (groups, -1)),
            VisibilityMask.of(v_BTHP.shape[1], v_BTHP.device, starts_BT),
            see_themselves=own_step_BTH1 is None,
        )
        if self.D_H is None:
            D_H1 = None
        else:
            D_H1 = self.D_H.to(wide).unsqueeze(1)
        return SSDChunk(v_BTHP, step_BTH1, own_step_BTH1, D_H1, core)


@dataclass
class SSDChunk:
    """T tokens of `decay_scan`. Steps that are None count as 1, and a D that is None counts as 0.

    If steps are given, `core` computes y_i without token i's own term, own_step_i (q_i . k_i) v_i. This class adds the
    own term and D v_i.
    """

    v_BTHP: Tensor
    step_BTH1: Tensor | None
    own_step_BTH1: Tensor | None
    D_H1: Tensor | None
    core: DecayChunk

    def forward(self, state_BGNV: Tensor) -> tuple[Tensor, Tensor]:
        y_BTHP = self.core.outputs(state_BGNV).transpose(1, 2).reshape(self.v_BTHP.shape)
        if (worth_BTH1 := self._own_worth) is not None:
            y_BTHP = y_BTHP.addcmul(worth_BTH1, self.v_BTHP)
        return y_BTHP, self.core.next_state(state_BGNV)

    def backward(
        self, state_BGNV: Tensor, grad_y_BTHP: Tensor, grad_state_BGNV: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients of (v, g, k, q, step, own_step), (D,) and the state before the chunk."""
        of_worth_BTH = of_own_step_BTH = of_scores_BTH = of_step_BTH = None
        if self._own_worth is not None:
            of_worth_BTH = (grad_y_BTHP * self.v_BTHP).sum(-1)
        if self.own_step_BTH1 is not None and of_worth_BTH is not None:
            of_own_step_BTH = of_worth_BTH * self._own_scores.squeeze(3)
            of_scores_BTH = of_worth_BTH * self.own_step_BTH1.squeeze(3)
        grad_y_BGTV = _grouped(grad_y_BTHP, state_BGNV.shape[1])
        of = self.core.backward(state_BGNV, grad_y_BGTV, grad_state_BGNV, of_scores_BTH)
        of_v_BTHP = of.v_BGTV.transpose(1, 2).reshape(self.v_BTHP.shape)
        of_g_BTH = of.g_BGRT.flatten(1, 2).transpose(1, 2)
        if self.step_BTH1 is not None:
            of_step_BTH = (of_v_BTHP * self.v_BTHP).sum(-1)
            of_v_BTHP = of_v_BTHP * self.step_BTH1
        if self._own_worth is not None:
            of_v_BTHP = of_v_BTHP.addcmul(self._own_worth, grad_y_BTHP)
        of_k_q = of.k_BGTN.transpose(1, 2), of.q_BGTN.transpose(1, 2)
        if self.D_H1 is None or of_worth_BTH is None:
            of_D = ()
        else:
            of_D = (of_worth_BTH.sum((0, 1), dtype=torch.float64),)
        return (of_v_BTHP, of_g_BTH, *of_k_q, of_step_BTH, of_own_step_BTH), of_D, of.state_BGNV

    @cached_property
    def _own_worth(self) -> Tensor | None:
        """Factor of v_i in the terms that this class adds: own_step_i (q_i . k_i) + D (B, T, H, 1), or D (H, 1)."""
        if self.own_step_BTH1 is None:
            return self.D_H1
        worth_BTH1 = self.own_step_BTH1 * self._own_scores
        if self.D_H1 is None:
            return worth_BTH1
        return worth_BTH1 + self.D_H1

    @cached_property
    def _own_scores(self) -> Tensor:
        """Each token's q_i . k_i, for each head (B, T, H, 1)."""
        scores_BGT = (self.core.q_BGTN * self.core.k_BGTN).sum(-1)
        return scores_BGT.transpose(1, 2).repeat_interleave(self.core.heads, dim=2).unsqueeze(3)


def _grouped(x_BTHP: Tensor, groups: int) -> Tensor:
    """Return x as (B, G, T, V), with the channels of a group's heads on one axis."""
    return x_BTHP.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
