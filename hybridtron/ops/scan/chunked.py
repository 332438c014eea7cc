"""The selective scan in torch alone, one chunk of tokens at a time, with its own backward pass.

The forward pass computes

    delta_t = softplus(dt_t + dt_bias),   s_t = delta_t x_t (the step),   a_t = delta_t A (the exponent)
    h_t = exp(a_t) h_{t-1} + B_t s_t,     y_t = (C_t h_t + D x_t) silu(z_t)

and saves the inputs and the state before each chunk. The backward pass recomputes the states inside a chunk. In the
following formulas dx is x's gradient, dy is y's gradient, and so on. g_t is the gradient of C_t h_t + D x_t, and G_t is
the gradient of h_t:

    g_t = dy_t silu(z_t),   dz_t = dy_t (C_t h_t + D x_t) silu'(z_t)
    G_t = C_t g_t + exp(a_{t+1}) G_{t+1}               a recurrence from the last token to the first
    dC_t = sum over channels of h_t g_t,   dB_t = sum over channels of G_t s_t
    ds_t = sum_n G_t B_t,                  da_t = exp(a_t) h_{t-1} G_t
    dA = sum_t delta_t da_t,               ddelta_t = sum_n A da_t + x_t ds_t
    dx_t = delta_t ds_t + D g_t,           ddt_t = ddelta_t sigmoid(dt_t + dt_bias)
    dD = sum_t g_t x_t,                    ddt_bias = sum_t ddt_t

The sums over t also run over all sequences in the batch. At the last token in a chunk, exp(a_{t+1}) G_{t+1} is the
gradient that the next chunk's backward pass returns for the state between the chunks; for the last chunk it is the
gradient of the final state. For the state before a chunk, the chunk returns exp(a_1) G_1; token 1 is its first token.
At the first token in a document, exp(a_t) is replaced by 0 in both passes.

Legend: B rows (sequences in a batch), L tokens, T tokens per chunk, E inner channels, N state entries per channel.
States are (B, E, N) in the op's inputs and outputs, and (B, N, E) inside, because a CPU is fast on long vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.chunks import scan_chunks
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.recurrence import recur
from hybridtron.ops.scan.reference import ScanInputs, initial_state, selective_scan

CHUNK = 64  # tokens per chunk; the states of this number of tokens are in memory at the same time


@untraced  # torch.compile would trace the loop over chunks for minutes, and gain nothing
def chunked(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return y and the final state, computed with a few large operations per chunk."""
    if inputs.x_BLE.shape[1] <= 1:  # a single token, as in decoding
        return selective_scan(inputs)
    x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, D_E, dt_bias_E, z_BLE, _, documents_BL = inputs
    A_NE = A_EN.t().contiguous()
    starts_BL = document_starts(documents_BL)
    row = ChunkedRow(x_BLE, dt_BLE, B_BLN, C_BLN, z_BLE, A_NE, D_E, dt_bias_E, starts_BL)
    y_BLE, last_BNE = scan_chunks(row, CHUNK, initial_state(inputs).transpose(1, 2))
    return y_BLE, last_BNE.transpose(1, 2)


CHUNKED = Implementation("chunked", chunked)


class ChunkedRow(NamedTuple):
    """The inputs without the state; A is transposed, so that channels are its last axis.

    The fields are in the order that `hybridtron.ops.chunks` expects: first tensors with a gradient per token, then
    parameters (PARAMETERS is their number), then the mask of the tokens that begin a document.
    """

    x_BLE: Tensor
    dt_BLE: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    z_BLE: Tensor | None
    A_NE: Tensor
    D_E: Tensor
    dt_bias_E: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 3

    def chunk(self, tokens: slice) -> ScanChunk:
        """Return consecutive tokens as a chunk, with tokens as the first axis, in fp32 or float64."""
        wide = wide_type(self.x_BLE)

        def part(tensor_BL: Tensor) -> Tensor:
            return tensor_BL[:, tokens].transpose(0, 1).to(wide)

        return ScanChunk(
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
class ScanChunk:
    """The inputs for T tokens, with methods that compute outputs and gradients, given the state before the tokens."""

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
            # indices instead of a mask: few tokens begin a document, while masked operations read all tokens
            self.begun = self.starts_TB.nonzero(as_tuple=True)

    def forward(self, state_BNE: Tensor) -> tuple[Tensor, Tensor]:
        """Return y with the gate applied, and the state after the chunk."""
        h_TBNE = self.states(self.decays()[:-1], state_BNE)
        y_TBE = self.outputs(h_TBNE)
        if self.z_TBE is not None:
            y_TBE *= F.silu(self.z_TBE)
        return y_TBE.transpose(0, 1), h_TBNE[-1].clone()

    def decays(self) -> Tensor:
        """Return (T + 1, B, N, E): exp(delta A) for each token, or 0 if it begins a document; then an entry of 1.

        The backward pass reads the last entry: the gradient of the state after the chunk reaches the chunk's last
        token without decay.
        """
        length, batch, _ = self.x_TBE.shape
        decay_TBNE = self.A_NE.new_empty(length + 1, batch, *self.A_NE.shape)
        torch.mul(self.delta_TBE.unsqueeze(2), self.A_NE, out=decay_TBNE[:-1]).exp_()
        if self.starts_TB is not None:
            decay_TBNE[:-1][self.begun] = 0
        decay_TBNE[-1] = 1
        return decay_TBNE

    def states(self, decay_TBNE: Tensor, state_BNE: Tensor) -> Tensor:
        """Return (T + 1, B, N, E): the state before the chunk, then the state after each token."""
        h_TBNE = decay_TBNE.new_empty(len(decay_TBNE) + 1, *state_BNE.shape)
        h_TBNE[0] = state_BNE
        step_TB1E = self.step_TBE.unsqueeze(2)
        B_TBN1 = self.B_TBN.unsqueeze(3)
        torch.mul(step_TB1E, B_TBN1, out=h_TBNE[1:])
        recur(decay_TBNE, step_TB1E, B_TBN1, h_TBNE[1:], state_BNE, self.starts_TB)
        return h_TBNE

    def outputs(self, h_TBNE: Tensor) -> Tensor:
        """Return C h + D x, before the gate."""
        return (self.C_TBN.unsqueeze(2) @ h_TBNE[1:]).squeeze(2).addcmul_(self.D_E, self.x_TBE)

    def backward(
        self, state_BNE: Tensor, grad_y_BTE: Tensor, grad_state_BNE: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients of (x, dt, B, C, z), (A, D, dt_bias) and the state before the chunk."""
        grad_y_TBE = grad_y_BTE.transpose(0, 1)
        decay_TBNE = self.decays()
        h_TBNE = self.states(decay_TBNE[:-1], state_BNE)
        grad_z_TBE = None
        if self.z_TBE is not None:
            gate_TBE = torch.sigmoid(self.z_TBE)
            slope_TBE = gate_TBE * (1 + self.z_TBE * (1 - gate_TBE))
            grad_z_TBE = grad_y_TBE * self.outputs(h_TBNE) * slope_TBE
            grad_y_TBE = grad_y_TBE * self.z_TBE * gate_TBE

        grad_y_TB1E = grad_y_TBE.unsqueeze(2)
        C_TBN1 = self.C_TBN.unsqueeze(3)
        grad_h_TBNE = grad_y_TB1E * C_TBN1
        if self.starts_TB is None:
            next_starts_TB = None
        else:
            next_starts_TB = F.pad(self.starts_TB[1:], (0, 0, 0, 1))
        recur(decay_TBNE[1:], grad_y_TB1E, C_TBN1, grad_h_TBNE, grad_state_BNE, next_starts_TB, back=True)
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
        by_token = grad_x_TBE, grad_dt_TBE, grad_B_TBN, grad_C_TBN, grad_z_TBE
        of_tokens = tuple(None if grad is None else grad.transpose(0, 1) for grad in by_token)
        of_parameters = grad_A_NE, (grad_y_TBE * self.x_TBE).sum((0, 1)), grad_dt_TBE.sum((0, 1))
        return of_tokens, of_parameters, grad_state_BNE
