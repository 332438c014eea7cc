"""GLA in torch alone: matrix products over a chunk of tokens, with its own backward pass.

With S_i the sum of g over the tokens of i's document in the chunk, up to i itself, and T the last token:

    y_i   = sum_{j <= i} A_ij v_j + h_in^T (q_i exp(S_i)),   A_ij = sum over n of q_in k_jn exp(S_in - S_jn)
    h_out = exp(S_T) h_in + sum_j (k_j exp(S_T - S_j)) v_j^T

A can't be computed as the product of q exp(S) and k exp(-S): exp(-S) overflows after a few strong decays. So a chunk is
cut into blocks of SUB tokens. Between the tokens i of a block that begins with r, and all j before the block,

    A_ij = (q_i exp(S_i - S_r)) . (k_j exp(S_r - S_j))

is a product with no exponent above 0, and inside a block every pair of tokens has its own exponents.

Backward, with M_ij = dy_i . v_j where i sees j, and dh the gradient of h_out:

    dq_i = sum_j M_ij k_j exp(S_i - S_j) + exp(S_i) h_in dy_i
    dk_j = sum_i M_ij q_i exp(S_i - S_j) + exp(S_T - S_j) dh v_j
    dv_j = sum_i A_ij dy_i + dh^T (k_j exp(S_T - S_j))
    dh_in = exp(S_T) dh + sum_i (q_i exp(S_i)) dy_i^T
    dg_t = sum_{s >= t} (q_s dq_s - k_s dk_s) + sum over values of h_out dh       for each key channel

over the tokens s of t's document, with the last term only for tokens of the last document. For g_t decays every path
from a j < t, or from h_in, to an i >= t or to h_out. q_s dq_s has all paths that end at s, k_s dk_s all that begin at
s, also those to h_out, and the last term all paths to h_out. So paths from one s >= t to another, or to h_out, cancel.
The sums are in float64.

Legend: as in `reference`; T tokens of one chunk, S of one block, K tokens before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.chunks import scan_chunks
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla.decay import ChunkDecay, DecayBlock
from hybridtron.ops.gla.reference import GLAInputs, gla_scan, initial_state
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.decay import Sight

CHUNK = 64  # tokens that see each other through a matrix; forward saves one state per chunk for backward


@untraced  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """Scan by products over full chunks; backward computes their inner values again instead of saving them."""
    if inputs.v_BLHP.shape[1] <= 1:  # decoding: one step of the loop is all there is to do
        return gla_scan(inputs)
    row = GLARow(inputs.v_BLHP, *inputs[:2], inputs.g_BLHN, document_starts(inputs.documents_BL))
    return scan_chunks(row, CHUNK, initial_state(inputs))


CHUNKED = Implementation("chunked", chunked)


class GLARow(NamedTuple):
    """The inputs without the state, in the order of the gradients."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    g_BLHN: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 0

    def chunk(self, tokens: slice) -> GLAChunk:
        """Return a chunk of tokens, converted to the dtype to compute in."""
        wide = wide_type(self.v_BLHP)
        v_BHTP, q_BHTN, k_BHTN = (t[:, tokens].to(wide).transpose(1, 2) for t in self[:3])
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        sight = Sight.of(v_BHTP.shape[2], v_BHTP.device, starts_BT)
        return GLAChunk(q_BHTN, k_BHTN, v_BHTP, self.g_BLHN[:, tokens].transpose(1, 2), sight, starts_BT)


class GLAChunk:
    """T tokens, with their outputs and gradients given the state before them."""

    def __init__(
        self, q_BHTN: Tensor, k_BHTN: Tensor, v_BHTP: Tensor, g_BHTN: Tensor, sight: Sight, starts_BT: Tensor | None
    ) -> None:
        self.q_BHTN = q_BHTN
        self.k_BHTN = k_BHTN
        self.v_BHTP = v_BHTP
        self.sight = sight
        self.starts_BT = starts_BT
        self.decay = ChunkDecay(g_BHTN, sight, v_BHTP.dtype)

    def forward(self, state_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Return y of every token (B, T, H, P), and the state after the last token."""
        y_BHTP = self._of_first_document((self.q_BHTN * self.decay.since_start_BHTG) @ state_BHNP)
        for block in self.decay.blocks():
            q_BHSN, k_BHKN = self._towards_first(block)
            y_BHSP = y_BHTP[:, :, block.tokens]
            y_BHSP += (q_BHSN @ k_BHKN.mT) @ self.v_BHTP[:, :, block.past]
            y_BHSP += self._scores_inside(block) @ self.v_BHTP[:, :, block.tokens]
        return y_BHTP.transpose(1, 2), self.next_state(state_BHNP)

    def next_state(self, state_BHNP: Tensor) -> Tensor:
        """Return the state after the last token."""
        decayed_BHNP = self._passed_through(self.decay.whole_BHG1 * state_BHNP)
        return decayed_BHNP + (self.k_BHTN * self.decay.to_end_BHTG).mT @ self.v_BHTP

    def backward(
        self, state_BHNP: Tensor, grad_y_BTHP: Tensor, grad_state_BHNP: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients for (v, q, k, g), for no parameters, and for the chunk's initial state."""
        grad_y_BHTP = grad_y_BTHP.transpose(1, 2)
        grad_q_BHTN = self._of_first_document(self.decay.since_start_BHTG * (grad_y_BHTP @ state_BHNP.mT))
        grad_k_BHTN = self.decay.to_end_BHTG * (self.v_BHTP @ grad_state_BHNP.mT)
        grad_v_BHTP = (self.k_BHTN * self.decay.to_end_BHTG) @ grad_state_BHNP
        for block in self.decay.blocks():
            self._backward_of(block, grad_y_BHTP, grad_q_BHTN, grad_k_BHTN, grad_v_BHTP)
        grad_before_BHNP = self._passed_through(self.decay.whole_BHG1 * grad_state_BHNP)
        grad_before_BHNP += (self.q_BHTN * self.decay.since_start_BHTG).mT @ grad_y_BHTP
        to_state_BHN = (self.next_state(state_BHNP) * grad_state_BHNP).sum(-1, dtype=torch.float64)
        grad_g_BHTN = self._grad_g(self.q_BHTN * grad_q_BHTN, self.k_BHTN * grad_k_BHTN, to_state_BHN)
        grads = grad_v_BHTP, grad_q_BHTN, grad_k_BHTN, grad_g_BHTN
        return tuple(grad.transpose(1, 2) for grad in grads), (), grad_before_BHNP

    def _backward_of(
        self, block: DecayBlock, grad_y_BHTP: Tensor, grad_q_BHTN: Tensor, grad_k_BHTN: Tensor, grad_v_BHTP: Tensor
    ) -> None:
        """Accumulate the gradients that flow from a block's outputs, to its own tokens and to those before it."""
        tokens = block.tokens
        past = block.past
        inside_BHSSN = block.inside_BHSSN
        grad_y_BHSP = grad_y_BHTP[:, :, tokens]
        q_BHSN, k_BHKN = self._towards_first(block)
        grad_past_BHSK = grad_y_BHSP @ self.v_BHTP[:, :, past].mT
        grad_q_BHTN[:, :, tokens] += block.from_first_BHSN * (grad_past_BHSK @ k_BHKN)
        grad_k_BHTN[:, :, past] += block.to_first_BHKN * (grad_past_BHSK.mT @ q_BHSN)
        grad_v_BHTP[:, :, past] += (q_BHSN @ k_BHKN.mT).mT @ grad_y_BHSP
        grad_BHSSN = (grad_y_BHSP @ self.v_BHTP[:, :, tokens].mT).unsqueeze(-1) * inside_BHSSN
        grad_q_BHTN[:, :, tokens] += (grad_BHSSN * self.k_BHTN[:, :, tokens].unsqueeze(2)).sum(3)
        grad_k_BHTN[:, :, tokens] += (grad_BHSSN * self.q_BHTN[:, :, tokens].unsqueeze(3)).sum(2)
        grad_v_BHTP[:, :, tokens] += self._scores_inside(block).mT @ grad_y_BHSP

    def _grad_g(self, of_queries_BHTN: Tensor, of_keys_BHTN: Tensor, to_state_BHN: Tensor) -> Tensor:
        """Return the gradient of g, given q dq, k dk and h_out dh."""
        later_B1TT = self.decay.sees_B1TT.mT.double()
        grad_g_BHTN = later_B1TT @ (of_queries_BHTN.double() - of_keys_BHTN.double())
        to_state_BH1N = to_state_BHN.unsqueeze(2)
        if self.sight.last_BT is None or self.starts_BT is None:
            return grad_g_BHTN + to_state_BH1N
        grad_g_BHTN += to_state_BH1N.masked_fill(~_every_token(self.sight.last_BT), 0)
        return grad_g_BHTN.masked_fill_(_every_token(self.starts_BT), 0)  # exactly 0: it decays nothing

    def _towards_first(self, block: DecayBlock) -> tuple[Tensor, Tensor]:
        """Return a block's queries and the keys before it, both decayed so that their products are the scores."""
        q_BHSN = self.q_BHTN[:, :, block.tokens]
        k_BHKN = self.k_BHTN[:, :, block.past]
        return q_BHSN * block.from_first_BHSN, k_BHKN * block.to_first_BHKN

    def _scores_inside(self, block: DecayBlock) -> Tensor:
        """Return A_ij for a block's own pairs (B, H, S, S)."""
        q_BHS1N = self.q_BHTN[:, :, block.tokens].unsqueeze(3)
        k_BHSN1 = self.k_BHTN[:, :, block.tokens].unsqueeze(-1)
        return ((q_BHS1N * block.inside_BHSSN).transpose(2, 3) @ k_BHSN1).squeeze(-1).mT

    def _of_first_document(self, x_BHTP: Tensor) -> Tensor:
        """Set x to 0 for tokens outside the chunk's first document, which alone sees the state before the chunk.

        A product with a zero decay would not suffice: 0 times an infinite state is nan.
        """
        first_BT = self.sight.first_BT
        if first_BT is None:
            return x_BHTP
        return x_BHTP.masked_fill(~_every_token(first_BT), 0)

    def _passed_through(self, state_BHNP: Tensor) -> Tensor:
        """Set a state to 0 in rows in which a document begins inside the chunk."""
        through_B1 = self.sight.through_B1
        if through_B1 is None:
            return state_BHNP
        return state_BHNP.masked_fill(~through_B1[:, :, None, None], 0)


def _every_token(seen_BT: Tensor) -> Tensor:
    """Add axes to a mask of tokens, so that it broadcasts over (B, H, T, N)."""
    return seen_BT[:, None, :, None]
