"""The delta rule in torch alone: a triangular system and matrix products over a chunk, with its own backward pass.

With S_i the sum of g over the tokens of i's document in the chunk, up to i itself, T the last token, and the scores

    A_ij = sum over n of q_in k_jn exp(S_in - S_jn)   for j <= i
    P_ij = sum over n of k_in k_jn exp(S_in - S_jn)   for j < i

between tokens of one document (`decay`), a token's correction w_i = v_i - s_i^T k_i is v_i less the values that h_in
and the tokens before it already give for k_i:

    w_i = v_i - h_in^T (k_i exp(S_i)) - sum_{j < i} P_ij u_j,   u_i = beta_i w_i

This is a triangular system with ones on its diagonal, (I + P diag(beta)) W = V - (K exp(S)) h_in, solved in the wide
type: the WY form of the product of the tokens' matrices, Yang et al. 2024. With u known, the rest is the recurrence
without the delta rule, with u as its values:

    y_i   = sum_{j <= i} A_ij u_j + h_in^T (q_i exp(S_i))
    h_out = exp(S_T) h_in + sum_j (k_j exp(S_T - S_j)) u_j^T

Only the chunk's first document sees h_in, and only its last enters h_out.

Backward, with dh the gradient of h_out. y and h_out are linear in u, and the w of every later token depends on u. With
x_i the gradient of the right side of w_i, which is dv_i:

    du_j = sum_{i >= j} A_ij dy_i + dh^T (k_j exp(S_T - S_j)) - sum_{i > j} P_ij x_i,   x_i = beta_i du_i
    dv_i = x_i,   dbeta_i = w_i . du_i,   dA_ij = dy_i . u_j,   dP_ij = - x_i . u_j
    dh_in = exp(S_T) dh + sum_i (q_i exp(S_i)) dy_i^T - sum_i (k_i exp(S_i)) x_i^T

The equations of du are a triangular system again, (I + P^T diag(beta)) dU = A^T dY + (K exp(S_T - S)) dh. beta_j stands
only in u_j = beta_j w_j, so its gradient is w_j . du_j. In P and in the right side, keys read as queries do in A and y.
They are a second row of readers, with -x in the place of dy. The gradient of every reader r, through pairs and from
h_in, is

    dr_i = sum_j dA_ij k_j exp(S_i - S_j) + exp(S_i) h_in dy_i

and a key that is read gets sum_i dA_ij r_i exp(S_i - S_j) + exp(S_T - S_j) dh u_j. g_t stands between every j < t and
every i >= t, and so

    dg_t = sum_{i >= t} (sum over readers of r_i dr_i, less k_i times its gradient as a key that pairs read)
           + sum_{j < t} k_j exp(S_T - S_j) dh u_j + sum over values of exp(S_T) h_in dh

for each key channel or summed over them, over tokens of t's document.

Legend: as in `reference`; T tokens of one chunk; 2: queries and keys, as readers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.chunks import scan_chunks
from hybridtron.ops.delta.decay import ChannelDecay, DeltaDecay, HeadDecay
from hybridtron.ops.delta.reference import DeltaInputs, delta_scan, initial_state
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.decay import Sight

CHUNK = 64  # tokens of a triangular system; forward saves one state per chunk for backward


@untraced  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Scan by products over full chunks; backward computes their inner values again instead of saving them."""
    if inputs.v_BLHP.shape[1] <= 1:  # decoding: one step of the loop is all there is to do
        return delta_scan(inputs)
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, _, documents_BL = inputs
    row = DeltaRow(v_BLHP, q_BLHN, k_BLHN, beta_BLH, g_BLHG, document_starts(documents_BL))
    return scan_chunks(row, CHUNK, initial_state(inputs))


CHUNKED = Implementation("chunked", chunked)


class DeltaRow(NamedTuple):
    """The inputs without the state, in the order of the gradients."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 0

    def chunk(self, tokens: slice) -> DeltaChunk:
        """Return a chunk of tokens, converted to the dtype to compute in."""
        wide = wide_type(self.v_BLHP)
        v_BHTP, q_BHTN, k_BHTN = (t[:, tokens].to(wide).transpose(1, 2) for t in self[:3])
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        sight = Sight.of(v_BHTP.shape[2], v_BHTP.device, starts_BT)
        beta_BHT = self.beta_BLH[:, tokens].to(wide).transpose(1, 2)
        by_head = self.g_BLHG.shape[3] == 1
        decay = (HeadDecay if by_head else ChannelDecay)(self.g_BLHG[:, tokens].transpose(1, 2), sight, wide)
        return DeltaChunk(torch.stack((q_BHTN, k_BHTN)), v_BHTP, beta_BHT, decay, sight)


class DeltaChunk:
    """T tokens, with their outputs and gradients given the state before them."""

    def __init__(self, read_2BHTN: Tensor, v_BHTP: Tensor, beta_BHT: Tensor, decay: DeltaDecay, sight: Sight) -> None:
        self.read_2BHTN = read_2BHTN
        self.k_BHTN = read_2BHTN[1]
        self.v_BHTP = v_BHTP
        self.beta_BHT1 = beta_BHT[..., None]
        self.decay = decay
        self.sight = sight
        self.scores_2BHTT = decay.scores(read_2BHTN, self.k_BHTN)
        self.scores_2BHTT[1].tril_(-1)  # a token is corrected by the tokens before it, not by itself
        self.from_start_2BHTN = read_2BHTN * decay.since_start_BHTG
        self.to_end_BHTN = self.k_BHTN * decay.to_end_BHTG

    def forward(self, state_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Return y of every token (B, T, H, P), and the state after the last token."""
        first_BT = self.sight.first_BT
        through_B1 = self.sight.through_B1
        if first_BT is None or through_B1 is None:
            return self._forward(state_BHNP)
        # 0 times nan is nan: products with the zeros between documents would carry non-finite values into the next one
        lost_BH1P = ~state_BHNP.isfinite().all(2, keepdim=True)
        y_BTHP, next_BHNP = self._forward(state_BHNP.masked_fill(lost_BH1P, 0))
        y_BTHP.masked_fill_(lost_BH1P.transpose(1, 2) & first_BT[:, :, None, None], torch.nan)
        return y_BTHP, next_BHNP.masked_fill_(lost_BH1P & through_B1[:, :, None, None], torch.nan)

    def _forward(self, state_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        seen_2BHTP = self.from_start_2BHTN @ state_BHNP
        u_BHTP = self.beta_BHT1 * self._corrections(seen_2BHTP)
        y_BHTP = seen_2BHTP[0] + self.scores_2BHTT[0] @ u_BHTP
        return y_BHTP.transpose(1, 2), self.decay.whole_BHG1 * state_BHNP + self.to_end_BHTN.mT @ u_BHTP

    def backward(
        self, state_BHNP: Tensor, grad_y_BTHP: Tensor, grad_state_BHNP: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients for (v, q, k, beta, g), for no parameters, and for the chunk's initial state."""
        decay = self.decay
        grad_y_BHTP = grad_y_BTHP.transpose(1, 2)
        w_BHTP = self._corrections(self.from_start_2BHTN @ state_BHNP)
        u_BHTP = self.beta_BHT1 * w_BHTP
        grad_u_BHTP = self._grad_u(grad_y_BHTP, grad_state_BHNP)
        grad_v_BHTP = self.beta_BHT1 * grad_u_BHTP
        grad_2BHTP = torch.stack((grad_y_BHTP, -grad_v_BHTP))

        grad_2BHTT = grad_2BHTP @ u_BHTP.mT
        grad_2BHTT[1].tril_(-1)
        grad_read_2BHTN, grad_k_BHTN, gain_BHTG = decay.backward(
            grad_2BHTT, self.read_2BHTN, self.k_BHTN, self.scores_2BHTT
        )
        of_state_2BHTN = decay.since_start_BHTG * (grad_2BHTP @ state_BHNP.mT)
        gain_BHTG += decay.by_gate((self.read_2BHTN * of_state_2BHTN).sum(0))
        to_state_BHTN = decay.to_end_BHTG * (u_BHTP @ grad_state_BHNP.mT)
        grad_before_BHNP = decay.whole_BHG1 * grad_state_BHNP
        through_BH1N = (grad_before_BHNP * state_BHNP).sum(-1).unsqueeze(2)
        grad_g_BHTG = decay.grad_g(gain_BHTG, decay.by_gate(self.k_BHTN * to_state_BHTN), decay.by_gate(through_BH1N))
        grad_q_BHTN, grad_lookup_BHTN = grad_read_2BHTN + of_state_2BHTN
        grad_before_BHNP += (self.from_start_2BHTN.mT @ grad_2BHTP).sum(0)
        grads = (
            grad_v_BHTP, grad_q_BHTN, grad_lookup_BHTN + grad_k_BHTN + to_state_BHTN, (w_BHTP * grad_u_BHTP).sum(-1),
            grad_g_BHTG,
        )  # fmt: skip
        return tuple(grad.transpose(1, 2) for grad in grads), (), grad_before_BHNP

    def _corrections(self, seen_2BHTP: Tensor) -> Tensor:
        """Solve the triangular system for w.

        `seen_2BHTP` holds the values that queries and keys read from the state before the chunk.
        """
        system_BHTT = self.scores_2BHTT[1] * self.beta_BHT1.mT
        return torch.linalg.solve_triangular(system_BHTT, self.v_BHTP - seen_2BHTP[1], upper=False, unitriangular=True)

    def _grad_u(self, grad_y_BHTP: Tensor, grad_state_BHNP: Tensor) -> Tensor:
        """Solve the transposed system for the gradient of u."""
        direct_BHTP = self.scores_2BHTT[0].mT @ grad_y_BHTP + self.to_end_BHTN @ grad_state_BHNP
        system_BHTT = self.scores_2BHTT[1].mT * self.beta_BHT1.mT
        return torch.linalg.solve_triangular(system_BHTT, direct_BHTP, upper=True, unitriangular=True)
