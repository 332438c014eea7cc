"""The selective scan of Mamba-1 (S6): Gu and Dao 2023, section 3.

    delta_t = softplus(dt_t + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t
    y_t = (C_t h_t + D x_t) * silu(z_t)

Where a new document begins, h_{t-1} is 0 instead: nothing of the document before remains, and no gradient returns to
it, finite or not. (A decay of 0 would leave 0 times infinity, a large negative exponent would cost precision.)

Not here: projections and convolution (mixers), and the forms `mamba-ssm` and `triton` (their own files).

Legend: B rows, L tokens, T tokens of one chunk, E inner channels, N state entries per channel. States are (B, E, N)
at the border of the op and (B, N, E) inside of `chunked`, because long vectors of channels are what a CPU is fast at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import op
from hybridtron.ops.scan.recurrence import recur

CHUNK = 64  # tokens whose states exist at the same time; backward keeps one state per chunk


@op
def selective_scan(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide = wide_type(x_BLE)
    x, delta, B, C = x_BLE.to(wide), step_sizes(dt_BLE, dt_bias_E), B_BLN.to(wide), C_BLN.to(wide)
    h_BEN = initial_state(x_BLE, A_EN, state_BEN)
    starts_BL = document_starts(documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        decay_BEN = torch.exp(delta[:, t, :, None] * A_EN)
        if starts_BL is not None:
            h_BEN = h_BEN.masked_fill(starts_BL[:, t, None, None], 0)
        h_BEN = decay_BEN * h_BEN + (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        outputs.append((h_BEN * C[:, t, None, :]).sum(-1) + D_E * x[:, t])
    y_BLE = torch.stack(outputs, dim=1)
    if z_BLE is not None:
        y_BLE = y_BLE * F.silu(z_BLE.to(wide))
    return y_BLE.to(x_BLE.dtype), h_BEN


def wide_type(x: Tensor) -> torch.dtype:
    """What states and sums are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def step_sizes(dt_BLE: Tensor, dt_bias_E: Tensor) -> Tensor:
    """delta, in the wide type."""
    wide = wide_type(dt_BLE)
    return F.softplus(dt_BLE.to(wide) + dt_bias_E.to(wide))


def initial_state(x_BLE: Tensor, A_EN: Tensor, state_BEN: Tensor | None) -> Tensor:
    """The state before the row in the wide type, zeros where there is none."""
    if state_BEN is None:
        return x_BLE.new_zeros(x_BLE.shape[0], *A_EN.shape, dtype=wide_type(x_BLE))
    return state_BEN.to(wide_type(x_BLE))


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Which tokens begin a document inside their row; a row's first token continues what came before the row."""
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)


@selective_scan.form("chunked")
@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Few operations on the states of a whole chunk, which backward computes again instead of keeping them."""
    if x_BLE.shape[1] == 1:  # decoding: one step of the loop is all there is to do
        return selective_scan.reference.function(
            x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, state_BEN, documents_BL
        )
    state_BNE = initial_state(x_BLE, A_EN, state_BEN).transpose(1, 2)
    starts_BL = document_starts(documents_BL)
    with torch.autocast(x_BLE.device.type, enabled=False):  # the products with B and C stay in fp32
        y_BLE, last_BNE = _ChunkedScan.apply(
            x_BLE, dt_BLE, B_BLN, C_BLN, z_BLE, A_EN.t().contiguous(), D_E, dt_bias_E, starts_BL, state_BNE
        )
    return y_BLE, last_BNE.transpose(1, 2)


class _ChunkedScan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *fields, state_BNE = inputs
        row = _Row(*fields)
        y_BLE = torch.empty_like(row.x_BLE, memory_format=torch.contiguous_format)
        states_before = []
        for tokens in row.chunks():
            chunk = row.chunk(tokens)
            states_before.append(state_BNE)
            h_TBNE = chunk.states(chunk.decays()[:-1], state_BNE)
            y_TBE = chunk.outputs(h_TBNE)
            if chunk.z_TBE is not None:
                y_TBE *= F.silu(chunk.z_TBE)
            y_BLE[:, tokens] = y_TBE.transpose(0, 1)
            state_BNE = h_TBNE[-1].clone()
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BLE, state_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_state_BNE: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row = _Row(*fields)
        per_token, parameters = fields[:5], fields[5:8]
        token_grads = [None if t is None else torch.empty_like(t) for t in per_token]
        parameter_grads = [torch.zeros_like(p, dtype=states_before.dtype) for p in parameters]
        for tokens, state_BNE in reversed(list(zip(row.chunks(), states_before, strict=True))):
            grad_y_TBE = grad_y_BLE[:, tokens].transpose(0, 1).to(states_before.dtype)
            of_tokens, of_parameters, grad_state_BNE = row.chunk(tokens).backward(state_BNE, grad_y_TBE, grad_state_BNE)
            for grad_BL, grad_TB in zip(token_grads, of_tokens, strict=True):
                if grad_BL is not None and grad_TB is not None:
                    grad_BL[:, tokens] = grad_TB.transpose(0, 1)
            for total, grad in zip(parameter_grads, of_parameters, strict=True):
                total += grad
        parameter_grads = [grad.to(p.dtype) for grad, p in zip(parameter_grads, parameters, strict=True)]
        return (*token_grads, *parameter_grads, None, grad_state_BNE)


@dataclass
class _Row:
    """The inputs of `chunked`."""

    x_BLE: Tensor
    dt_BLE: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    z_BLE: Tensor | None
    A_NE: Tensor
    D_E: Tensor
    dt_bias_E: Tensor
    starts_BL: Tensor | None

    def chunks(self) -> list[slice]:
        return [slice(start, start + CHUNK) for start in range(0, self.x_BLE.shape[1], CHUNK)]

    def chunk(self, tokens: slice) -> _Chunk:
        """A few tokens, time first and in the type to compute in."""
        wide = wide_type(self.x_BLE)

        def part(tensor_BL: Tensor) -> Tensor:
            return tensor_BL[:, tokens].transpose(0, 1).to(wide)

        return _Chunk(
            part(self.x_BLE),
            part(self.dt_BLE) + self.dt_bias_E.to(wide),
            part(self.B_BLN),
            part(self.C_BLN),
            None if self.z_BLE is None else part(self.z_BLE),
            self.A_NE.to(wide),
            self.D_E.to(wide),
            None if self.starts_BL is None else self.starts_BL[:, tokens].t(),
        )


@dataclass
class _Chunk:
    """T tokens, and what one computes from them and the state before them."""

    x_TBE: Tensor
    shifted_TBE: Tensor  # dt + dt_bias
    B_TBN: Tensor
    C_TBN: Tensor
    z_TBE: Tensor | None
    A_NE: Tensor
    D_E: Tensor
    starts_TB: Tensor | None

    def __post_init__(self) -> None:
        self.delta_TBE = F.softplus(self.shifted_TBE)
        self.step_TBE = self.delta_TBE * self.x_TBE
        if self.starts_TB is not None:
            self.begun = self.starts_TB.nonzero(as_tuple=True)  # few: a mask would cost a pass over all tokens

    def decays(self) -> Tensor:
        """exp(delta A) of each token, 0 where a document begins, then ones for what follows: (T + 1, B, N, E)."""
        length, batch, _ = self.x_TBE.shape
        decay_TBNE = self.A_NE.new_empty(length + 1, batch, *self.A_NE.shape)
        torch.mul(self.delta_TBE.unsqueeze(2), self.A_NE, out=decay_TBNE[:-1]).exp_()
        if self.starts_TB is not None:
            decay_TBNE[:-1][self.begun] = 0
        decay_TBNE[-1] = 1
        return decay_TBNE

    def states(self, decay_TBNE: Tensor, state_BNE: Tensor) -> Tensor:
        """The state before the chunk, then after each token: (T + 1, B, N, E)."""
        h_TBNE = decay_TBNE.new_empty(len(decay_TBNE) + 1, *state_BNE.shape)
        h_TBNE[0] = state_BNE
        added = self.step_TBE.unsqueeze(2), self.B_TBN.unsqueeze(3)
        torch.mul(*added, out=h_TBNE[1:])
        recur(decay_TBNE, *added, h_TBNE[1:], state_BNE, self.starts_TB)
        return h_TBNE

    def outputs(self, h_TBNE: Tensor) -> Tensor:
        """C h + D x, before the gate."""
        return (self.C_TBN.unsqueeze(2) @ h_TBNE[1:]).squeeze(2).addcmul_(self.D_E, self.x_TBE)

    def backward(
        self, state_BNE: Tensor, grad_y_TBE: Tensor, grad_state_BNE: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Gradients of (x, dt, B, C, z), of (A, D, dt_bias), and of the state before the chunk."""
        decay_TBNE = self.decays()
        h_TBNE = self.states(decay_TBNE[:-1], state_BNE)
        grad_z_TBE = None
        if self.z_TBE is not None:
            gate_TBE = torch.sigmoid(self.z_TBE)
            slope_TBE = gate_TBE * (1 + self.z_TBE * (1 - gate_TBE))
            grad_z_TBE = grad_y_TBE * self.outputs(h_TBNE) * slope_TBE
            grad_y_TBE = grad_y_TBE * self.z_TBE * gate_TBE

        read = grad_y_TBE.unsqueeze(2), self.C_TBN.unsqueeze(3)
        grad_h_TBNE = torch.mul(*read)
        next_starts_TB = None if self.starts_TB is None else F.pad(self.starts_TB[1:], (0, 0, 0, 1))
        recur(decay_TBNE[1:], *read, grad_h_TBNE, grad_state_BNE, next_starts_TB, back=True)
        grad_C_TBN = (h_TBNE[1:] @ grad_y_TBE.unsqueeze(3)).squeeze(3)
        grad_B_TBN = (grad_h_TBNE @ self.step_TBE.unsqueeze(3)).squeeze(3)
        grad_step_TBE = (self.B_TBN.unsqueeze(2) @ grad_h_TBNE).squeeze(2)

        grad_state_BNE = decay_TBNE[0] * grad_h_TBNE[0]
        grad_exponent_TBNE = decay_TBNE[:-1].mul_(h_TBNE[:-1]).mul_(grad_h_TBNE)
        if self.starts_TB is not None:
            grad_state_BNE.masked_fill_(self.starts_TB[0, :, None, None], 0)
            grad_exponent_TBNE[self.begun] = 0
        grad_A_NE = torch.mul(grad_exponent_TBNE, self.delta_TBE.unsqueeze(2), out=grad_h_TBNE).sum((0, 1))
        grad_delta_TBE = grad_exponent_TBNE.mul_(self.A_NE).sum(2).addcmul_(grad_step_TBE, self.x_TBE)
        grad_dt_TBE = grad_delta_TBE * torch.sigmoid(self.shifted_TBE)
        grad_x_TBE = (grad_step_TBE * self.delta_TBE).addcmul_(self.D_E, grad_y_TBE)
        of_tokens = grad_x_TBE, grad_dt_TBE, grad_B_TBN, grad_C_TBN, grad_z_TBE
        of_parameters = grad_A_NE, (grad_y_TBE * self.x_TBE).sum((0, 1)), grad_dt_TBE.sum((0, 1))
        return of_tokens, of_parameters, grad_state_BNE
