"""The scan of Mamba-2 (SSD, state space duality): Dao and Gu 2024.

    delta_t = softplus(dt_t + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T          one number A and one delta for each head
    y_t = h_t C_t + D x_t

It is the log-decay recurrence of `decay` with q = C, k = B, v = delta x and g = delta A. Heads of a group share B and
C: head h belongs to group h // (H / G). Where a new document begins, nothing of the one before remains.

Not here: projections, convolution and gated norm (mixers), limits of delta, which no published model sets, and the
`mamba-ssm` form (its own file).

Legend: B rows, L tokens, T tokens of one chunk, H heads, P head size, G groups, R heads of a group, N state size, V =
R P. States are (B, H, P, N) at the border of the op and (B, G, N, V) inside of `chunked`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import op
from hybridtron.ops.scan.reference import document_starts, step_sizes, wide_type
from hybridtron.ops.ssd.decay import Chunk, Sight

CHUNK = 128  # tokens that see each other through a matrix; backward keeps one state per chunk


@op
def ssd_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide, heads_of_group = wide_type(x_BLHP), x_BLHP.shape[2] // B_BLGN.shape[2]
    x, delta_BLH = x_BLHP.to(wide), step_sizes(dt_BLH, dt_bias_H).to(wide)
    B_BLHN, C_BLHN = (t.to(wide).repeat_interleave(heads_of_group, dim=2) for t in (B_BLGN, C_BLGN))
    h_BHPN = _initial_state(x_BLHP, B_BLGN, state_BHPN)
    starts_BL = document_starts(documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        if starts_BL is not None:
            h_BHPN = h_BHPN.masked_fill(starts_BL[:, t, None, None, None], 0)
        decay_BH = torch.exp(delta_BLH[:, t] * A_H)
        step_BHP = delta_BLH[:, t, :, None] * x[:, t]
        h_BHPN = decay_BH[:, :, None, None] * h_BHPN + step_BHP.unsqueeze(3) * B_BLHN[:, t].unsqueeze(2)
        outputs.append((h_BHPN * C_BLHN[:, t].unsqueeze(2)).sum(-1) + D_H[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(x_BLHP.dtype), h_BHPN


def _initial_state(x_BLHP: Tensor, B_BLGN: Tensor, state_BHPN: Tensor | None) -> Tensor:
    """The state before the row in the wide type, zeros where there is none."""
    if state_BHPN is None:
        rows, _, heads, size = x_BLHP.shape
        return x_BLHP.new_zeros(rows, heads, size, B_BLGN.shape[3], dtype=wide_type(x_BLHP))
    return state_BHPN.to(wide_type(x_BLHP))


@ssd_scan.form("chunked")
@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Matrix products over whole chunks, which backward computes again instead of keeping what is between them."""
    if x_BLHP.shape[1] == 1:  # decoding: one step of the loop is all there is to do
        return ssd_scan.reference.function(
            x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL
        )
    groups = B_BLGN.shape[2]
    state_BGRPN = _initial_state(x_BLHP, B_BLGN, state_BHPN).unflatten(1, (groups, -1))
    state_BGNV = state_BGRPN.permute(0, 1, 4, 2, 3).flatten(3)
    starts_BL = document_starts(documents_BL)
    with torch.autocast(x_BLHP.device.type, enabled=False):  # the products stay in fp32
        y_BLHP, last_BGNV = _ChunkedScan.apply(
            x_BLHP, dt_BLH, B_BLGN, C_BLGN, A_H, D_H, dt_bias_H, starts_BL, state_BGNV
        )
    last_BGNRP = last_BGNV.unflatten(3, state_BGRPN.shape[2:4])
    return y_BLHP, last_BGNRP.permute(0, 1, 3, 4, 2).flatten(1, 2)


class _ChunkedScan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *fields, state_BGNV = inputs
        row = _Row(*fields)
        y_BLHP = torch.empty_like(row.x_BLHP, memory_format=torch.contiguous_format)
        states_before = []
        for tokens in row.chunks():
            chunk = _Discrete.of(row, tokens)
            states_before.append(state_BGNV)
            y_BLHP[:, tokens] = chunk.outputs(state_BGNV)
            state_BGNV = chunk.core.next_state(state_BGNV)
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BLHP, state_BGNV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_state_BGNV: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row = _Row(*fields)
        token_grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in fields[:4]]
        parameters = fields[4:7]
        parameter_grads = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for tokens, state_BGNV in reversed(list(zip(row.chunks(), states_before, strict=True))):
            chunk = _Discrete.of(row, tokens)
            of_tokens, of_parameters, grad_state_BGNV = chunk.backward(
                state_BGNV, grad_y_BLHP[:, tokens].to(states_before.dtype), grad_state_BGNV
            )
            for grad_BL, grad_BT in zip(token_grads, of_tokens, strict=True):
                grad_BL[:, tokens] = grad_BT
            for total, grad in zip(parameter_grads, of_parameters, strict=True):
                total += grad
        parameter_grads = [grad.to(p.dtype) for grad, p in zip(parameter_grads, parameters, strict=True)]
        return (*token_grads, *parameter_grads, None, grad_state_BGNV)


@dataclass
class _Row:
    """The inputs of `chunked`."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    starts_BL: Tensor | None

    def chunks(self) -> list[slice]:
        return [slice(start, start + CHUNK) for start in range(0, self.x_BLHP.shape[1], CHUNK)]


@dataclass
class _Discrete:
    """T tokens in the type to compute in, and the recurrence that their steps make of them."""

    x_BTHP: Tensor
    shifted_BTH: Tensor  # dt + dt_bias
    delta_BTH: Tensor
    A_H: Tensor
    D_H: Tensor
    core: Chunk

    @staticmethod
    def of(row: _Row, tokens: slice) -> _Discrete:
        wide, groups = wide_type(row.x_BLHP), row.B_BLGN.shape[2]
        x_BTHP, shifted_BTH = row.x_BLHP[:, tokens].to(wide), row.dt_BLH[:, tokens].to(wide) + row.dt_bias_H.to(wide)
        delta_BTH = F.softplus(shifted_BTH)
        A_H, D_H = row.A_H.to(wide), row.D_H.to(wide)
        sight = Sight.of(x_BTHP.shape[1], x_BTHP.device, None if row.starts_BL is None else row.starts_BL[:, tokens])
        core = Chunk(
            row.C_BLGN[:, tokens].to(wide).transpose(1, 2),
            row.B_BLGN[:, tokens].to(wide).transpose(1, 2),
            _grouped(x_BTHP * delta_BTH.unsqueeze(3), groups),
            (delta_BTH.double() * A_H.double()).transpose(1, 2).unflatten(1, (groups, -1)),
            sight,
        )
        return _Discrete(x_BTHP, shifted_BTH, delta_BTH, A_H, D_H, core)

    def outputs(self, state_BGNV: Tensor) -> Tensor:
        """C h + D x."""
        y_BTHP = self.core.outputs(state_BGNV).transpose(1, 2).reshape(self.x_BTHP.shape)
        return y_BTHP.addcmul_(self.D_H.unsqueeze(1), self.x_BTHP)

    def backward(
        self, state_BGNV: Tensor, grad_y_BTHP: Tensor, grad_state_BGNV: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Gradients of (x, dt, B, C), of (A, D, dt_bias), and of the state before the chunk."""
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
        return of_tokens, of_parameters, of.state_BGNV


def _grouped(x_BTHP: Tensor, groups: int) -> Tensor:
    """The heads of a group side by side: (B, G, T, V)."""
    return x_BTHP.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
