"""The delta rule in torch: matrix multiplications and a triangular system per chunk, with its own backward pass.

`reference.py` has the recurrence over tokens. A chunk is CHUNK consecutive tokens of a row, numbered 1 to T. h_in and
h_out are the states before and after the chunk. S_i is the sum of g over the tokens of i's document in the chunk, up to
i itself. Scores between tokens of one document (`decay.py`) are

    A_ij = sum_n q_in k_jn exp(S_in - S_jn)   for j <= i
    P_ij = sum_n k_in k_jn exp(S_in - S_jn)   for j < i

The correction w_i of a token is its value v_i minus the value that the state stores for its key k_i. The stored value
comes from h_in and from the tokens before i, so

    w_i = v_i - h_in^T (k_i exp(S_i)) - sum_{j < i} P_ij u_j,   u_i = beta_i w_i

These equations are a triangular system with ones on its diagonal, (I + P diag(beta)) W = V - (K exp(S)) h_in, where W,
V and K exp(S) have the rows w_i, v_i and k_i exp(S_i). The system is solved in fp32 (float64 for float64 inputs). Yang
et al. 2024 call it the WY form. Once u is known, outputs and state follow as in linear attention with the values u:

    y_i   = sum_{j <= i} A_ij u_j + h_in^T (q_i exp(S_i))
    h_out = exp(S_T) h_in + sum_j (k_j exp(S_T - S_j)) u_j^T

In these sums, only tokens of the chunk's first document read h_in, and only tokens of its last document are added to
h_out.

The backward pass gets the gradients dy for y and dh for h_out. Let du and dw be the gradients for u and w. Because w_i
occurs only in u_i, dw_i = beta_i du_i; this is also dv_i, and is called x_i. u_j occurs in y, in h_out, and in the
corrections w of later tokens. So

    du_j = sum_{i >= j} A_ij dy_i + dh^T (k_j exp(S_T - S_j)) - sum_{i > j} P_ij x_i,   x_i = beta_i du_i
    dv_i = x_i,   dbeta_i = w_i . du_i,   dA_ij = dy_i . u_j,   dP_ij = - x_i . u_j
    dh_in = exp(S_T) dh + sum_i (q_i exp(S_i)) dy_i^T - sum_i (k_i exp(S_i)) x_i^T

The equations of du are also a triangular system, (I + P^T diag(beta)) dU = A^T dY + (K exp(S_T - S)) dh.

A token reads the state twice: with its query q_i for y_i, and with its key k_i for w_i. q_i and k_i are called readers
r_i. The same equation holds for both readers, with e_i = dy_i and E = A for the query, and with e_i = -x_i and E = P
for the key:

    dr_i = sum_j dE_ij k_j exp(S_i - S_j) + exp(S_i) h_in e_i

k_j also occurs in the scores of later readers, and in h_out. In addition to dr_j, its gradient therefore contains a
term a_j from the scores and a term from h_out:

    a_j + exp(S_T - S_j) dh u_j,   a_j = (sum over both readers of sum_i dE_ij r_i exp(S_i - S_j))

g_t decays everything that passes from a token j < t to a token i >= t, and so

    dg_t = sum_{i >= t} ((sum over both readers of r_i dr_i) - k_i a_i)
           + sum_{j < t} k_j exp(S_T - S_j) dh u_j + sum_p exp(S_T) h_in dh

The sums over i and j are over the tokens of t's document. This gives an entry of dg_t for each key channel. If a head
has one decay, these entries are summed over its key channels.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels n, P value channels p, G = N or 1 (a
decay per key channel or per head), T tokens per chunk. An axis of size 2 has the two readers: queries, then keys.
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
from hybridtron.ops.ssd.decay import VisibilityMask

CHUNK = 64  # tokens per chunk; the forward pass saves the state before each chunk for the backward pass


@untraced  # torch.compile would trace the loop over chunks for minutes, and gain nothing
def chunked(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return y and the state after the row, computed chunk by chunk; the backward pass recomputes each chunk."""
    if inputs.v_BLHP.shape[1] <= 1:  # a single token, as in text generation, needs no chunks
        return delta_scan(inputs)
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, _, documents_BL = inputs
    row = DeltaRow(v_BLHP, q_BLHN, k_BLHN, beta_BLH, g_BLHG, document_starts(documents_BL))
    return scan_chunks(row, CHUNK, initial_state(inputs))


CHUNKED = Implementation("chunked", chunked)


class DeltaRow(NamedTuple):
    """The op's inputs without the state, for `scan_chunks`. The gradients are returned in the order of these fields."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    starts_BL: Tensor | None

    PARAMETERS = 0  # number of parameter fields

    def chunk(self, tokens: slice) -> DeltaChunk:
        """Return a chunk, with its tensors in the dtype of the computation: fp32, or float64 for float64 inputs."""
        wide = wide_type(self.v_BLHP)
        v_BHTP, q_BHTN, k_BHTN = (t[:, tokens].to(wide).transpose(1, 2) for t in self[:3])
        if self.starts_BL is None:
            starts_BT = None
        else:
            starts_BT = self.starts_BL[:, tokens]
        visibility = VisibilityMask.of(v_BHTP.shape[2], v_BHTP.device, starts_BT)
        beta_BHT = self.beta_BLH[:, tokens].to(wide).transpose(1, 2)
        by_head = self.g_BLHG.shape[3] == 1
        decay = (HeadDecay if by_head else ChannelDecay)(self.g_BLHG[:, tokens].transpose(1, 2), visibility, wide)
        return DeltaChunk(torch.stack((q_BHTN, k_BHTN)), v_BHTP, beta_BHT, decay, visibility)


class DeltaChunk:
    """Computation of one chunk: outputs and gradients, given the state before the chunk."""

    def __init__(
        self, read_2BHTN: Tensor, v_BHTP: Tensor, beta_BHT: Tensor, decay: DeltaDecay, visibility: VisibilityMask
    ) -> None:
        self.read_2BHTN = read_2BHTN
        self.k_BHTN = read_2BHTN[1]
        self.v_BHTP = v_BHTP
        self.beta_BHT1 = beta_BHT[..., None]
        self.decay = decay
        self.visibility = visibility
        self.scores_2BHTT = decay.scores(read_2BHTN, self.k_BHTN)
        self.scores_2BHTT[1].tril_(-1)  # P_ij is 0 for j >= i
        self.from_start_2BHTN = read_2BHTN * decay.since_start_BHTG
        self.to_end_BHTN = self.k_BHTN * decay.to_end_BHTG

    def forward(self, state_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (B, T, H, P), and the state after the chunk."""
        first_BT = self.visibility.first_BT
        through_B1 = self.visibility.through_B1
        if first_BT is None or through_B1 is None:
            return self._forward(state_BHNP)
        # Between documents the decays are 0, but 0 times nan is nan. So value channels in which the state is not finite
        # are computed with a zero state. Afterwards y and the new state get nan in these channels, but only for tokens
        # of the document to which the state belongs.
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
        """Return the gradients for (v, q, k, beta, g), an empty tuple (no parameters), and the state's gradient."""
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
        """Return w, the solution of the triangular system.

        `seen_2BHTP` has the values that queries and keys read from the state before the chunk, (q exp(S)) h_in and
        (k exp(S)) h_in.
        """
        system_BHTT = self.scores_2BHTT[1] * self.beta_BHT1.mT
        return torch.linalg.solve_triangular(system_BHTT, self.v_BHTP - seen_2BHTP[1], upper=False, unitriangular=True)

    def _grad_u(self, grad_y_BHTP: Tensor, grad_state_BHNP: Tensor) -> Tensor:
        """Return du, the solution of the transposed triangular system."""
        direct_BHTP = self.scores_2BHTT[0].mT @ grad_y_BHTP + self.to_end_BHTN @ grad_state_BHNP
        system_BHTT = self.scores_2BHTT[1].mT * self.beta_BHT1.mT
        return torch.linalg.solve_triangular(system_BHTT, direct_BHTP, upper=True, unitriangular=True)
