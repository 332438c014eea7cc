"""Gated linear attention (GLA) in torch: matrix multiplications per chunk of tokens, with its own backward pass.

`reference.py` has the recurrence over tokens. A chunk is CHUNK consecutive tokens in a row, numbered 1 to T. h_in and
h_out are the states before and after the chunk. g <= 0 is the logarithm of the decay, for each token and key channel.
S_i is the sum of g over the tokens of i's document in the chunk, up to i itself. If all tokens are in one document,

    y_i   = sum_{j <= i} A_ij v_j + h_in^T (q_i exp(S_i)),   A_ij = sum_n q_in k_jn exp(S_in - S_jn)
    h_out = exp(S_T) h_in + sum_j (k_j exp(S_T - S_j)) v_j^T

With several documents, A_ij is 0 between documents. Only tokens in a document that began before the chunk see h_in, and
only tokens in the chunk's last document are added to h_out.

A can't be computed as q exp(S) times k exp(-S), since exp(-S) overflows after a few strong decays. Therefore the chunk
is divided into blocks with SUB tokens (`decay.py`). For token i in a block that begins with token r, and token j before
the block,

    A_ij = (q_i exp(S_i - S_r)) . (k_j exp(S_r - S_j))

Both exponents are at most 0. For two tokens in the same block, exp(S_i - S_j) is computed for each pair.

In the backward pass, let M_ij be dy_i . v_j if i sees j, else 0. Let dh be the gradient for h_out. Then

    dq_i = sum_j M_ij k_j exp(S_i - S_j) + exp(S_i) h_in dy_i
    dk_j = sum_i M_ij q_i exp(S_i - S_j) + exp(S_T - S_j) dh v_j
    dv_j = sum_i A_ij dy_i + dh^T (k_j exp(S_T - S_j))
    dh_in = exp(S_T) dh + sum_i (q_i exp(S_i)) dy_i^T
    dg_t = sum_{s >= t} (q_s dq_s - k_s dk_s) + sum_p h_out dh       for each key channel

The sum over s is over the tokens of t's document. The last term is only for tokens of the chunk's last document.

Reason for dg_t: a path leads from a source (a token j, or h_in) to a target (a token i, or h_out). Its contribution is
its term in the target, times the target's gradient. The term is proportional to exp(g_t) for each t that the path
passes, so the contribution is also the path's part of dg_t. A path passes t if its source is before t, and its target
is t or later. The contributions of all paths with target s add up to q_s dq_s. All paths with source s add up to
k_s dk_s, and all paths with target h_out add up to sum_p h_out dh. So dg_t adds the paths with targets from t on, and
subtracts the paths with sources from t on. The sums in dg_t are float64.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, P value channels p, T tokens per
chunk, S tokens per block, K tokens in the chunk that precede a block, G = N channels of the decay. The axis S is not
related to the sums S_i.
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
from hybridtron.ops.ssd.decay import VisibilityMask

CHUNK = 64  # tokens per chunk; the forward pass saves the state before each chunk for the backward pass


@untraced  # torch.compile would trace the loop over chunks for minutes, and gain nothing
def chunked(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """Return y and the state after the row, computed chunk by chunk; the backward pass recomputes each chunk."""
    if inputs.v_BLHP.shape[1] <= 1:  # a single token, as in text generation, needs no chunks
        return gla_scan(inputs)
    row = GLARow(inputs.v_BLHP, *inputs[:2], inputs.g_BLHN, document_starts(inputs.documents_BL))
    return scan_chunks(row, CHUNK, initial_state(inputs))


CHUNKED = Implementation("chunked", chunked)


class GLARow(NamedTuple):
    """The op's inputs without the state, for `scan_chunks`. The gradients are returned in the order of these fields."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    g_BLHN: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 0  # number of parameter fields

    def chunk(self, tokens: slice) -> GLAChunk:
        """Return a chunk. q, k and v are converted to fp32, or to float64 if v is float64."""
        wide = wide_type(self.v_BLHP)
        v_BHTP, q_BHTN, k_BHTN = (t[:, tokens].to(wide).transpose(1, 2) for t in self[:3])
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        visibility = VisibilityMask.of(v_BHTP.shape[2], v_BHTP.device, starts_BT)
        return GLAChunk(q_BHTN, k_BHTN, v_BHTP, self.g_BLHN[:, tokens].transpose(1, 2), visibility, starts_BT)


class GLAChunk:
    """Computation of one chunk: outputs and gradients, given the state before the chunk."""

    def __init__(
        self,
        q_BHTN: Tensor,
        k_BHTN: Tensor,
        v_BHTP: Tensor,
        g_BHTN: Tensor,
        visibility: VisibilityMask,
        starts_BT: Tensor | None,
    ) -> None:
        self.q_BHTN = q_BHTN
        self.k_BHTN = k_BHTN
        self.v_BHTP = v_BHTP
        self.visibility = visibility
        self.starts_BT = starts_BT
        self.decay = ChunkDecay(g_BHTN, visibility, v_BHTP.dtype)

    def forward(self, state_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (B, T, H, P), and the state after the chunk."""
        y_BHTP = self._of_first_document((self.q_BHTN * self.decay.since_start_BHTG) @ state_BHNP)
        for block in self.decay.blocks():
            q_BHSN, k_BHKN = self._towards_first(block)
            y_BHSP = y_BHTP[:, :, block.tokens]
            y_BHSP += (q_BHSN @ k_BHKN.mT) @ self.v_BHTP[:, :, block.past]
            y_BHSP += self._scores_inside(block) @ self.v_BHTP[:, :, block.tokens]
        return y_BHTP.transpose(1, 2), self.next_state(state_BHNP)

    def next_state(self, state_BHNP: Tensor) -> Tensor:
        """Return the state after the chunk."""
        decayed_BHNP = self._passed_through(self.decay.whole_BHG1 * state_BHNP)
        return decayed_BHNP + (self.k_BHTN * self.decay.to_end_BHTG).mT @ self.v_BHTP

    def backward(
        self, state_BHNP: Tensor, grad_y_BTHP: Tensor, grad_state_BHNP: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients for (v, q, k, g), an empty tuple (no parameters), and the state's gradient."""
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
        """Add the gradients that pass through the scores of a block's queries to dq, dk and dv, in place."""
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
        """Return dg, given q dq, k dk, and h_out dh summed over the value channels."""
        later_B1TT = self.decay.sees_B1TT.mT.double()
        grad_g_BHTN = later_B1TT @ (of_queries_BHTN.double() - of_keys_BHTN.double())
        to_state_BH1N = to_state_BHN.unsqueeze(2)
        if self.visibility.last_BT is None or self.starts_BT is None:
            return grad_g_BHTN + to_state_BH1N
        grad_g_BHTN += to_state_BH1N.masked_fill(~_every_token(self.visibility.last_BT), 0)
        # The first token of a document does not decay anything, since the state before it is zero.
        return grad_g_BHTN.masked_fill_(_every_token(self.starts_BT), 0)

    def _towards_first(self, block: DecayBlock) -> tuple[Tensor, Tensor]:
        """Return the block's decayed queries, and the decayed keys before the block; their dot products are scores."""
        q_BHSN = self.q_BHTN[:, :, block.tokens]
        k_BHKN = self.k_BHTN[:, :, block.past]
        return q_BHSN * block.from_first_BHSN, k_BHKN * block.to_first_BHKN

    def _scores_inside(self, block: DecayBlock) -> Tensor:
        """Return the scores A_ij of pairs in which both tokens are in the block (B, H, S, S)."""
        q_BHS1N = self.q_BHTN[:, :, block.tokens].unsqueeze(3)
        k_BHSN1 = self.k_BHTN[:, :, block.tokens].unsqueeze(-1)
        return ((q_BHS1N * block.inside_BHSSN).transpose(2, 3) @ k_BHSN1).squeeze(-1).mT

    def _of_first_document(self, x_BHTP: Tensor) -> Tensor:
        """Return x with 0 for tokens outside the chunk's first document.

        x was computed from the state before the chunk, which only the first document sees. For other tokens the decay
        is 0, but 0 times an infinite state is nan.
        """
        first_BT = self.visibility.first_BT
        if first_BT is None:
            return x_BHTP
        return x_BHTP.masked_fill(~_every_token(first_BT), 0)

    def _passed_through(self, state_BHNP: Tensor) -> Tensor:
        """Return the state, with zeros for rows in which a document begins inside the chunk."""
        through_B1 = self.visibility.through_B1
        if through_B1 is None:
            return state_BHNP
        return state_BHNP.masked_fill(~through_B1[:, :, None, None], 0)


def _every_token(seen_BT: Tensor) -> Tensor:
    """Return a mask of tokens with two new axes, so that it broadcasts over (B, H, T, N)."""
    return seen_BT[:, None, :, None]
