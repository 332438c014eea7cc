"""The recurrence with one log-decay per head, a chunk of tokens at a time: the core of SSD and similar mixers.

    h_t = exp(g_t) h_{t-1} + k_t v_t^T,   y_t = h_t^T q_t,   g_t <= 0          (Dao and Gu 2024, section 6)

With S_i the sum of g over the tokens of i's document in the chunk, up to i itself, and T the last token:

    y_i   = sum_{j <= i} exp(S_i - S_j) (q_i . k_j) v_j + exp(S_i) h_in^T q_i
    h_out = exp(S_T) h_in + sum_j exp(S_T - S_j) k_j v_j^T

where j is in i's document, only the chunk's first document sees h_in, and only its last enters h_out. Sums of g are
float64: in fp32 a few strong decays would blur all later ones in the chunk. Unseen pairs are masked in the exponent.
Products with h_in are also masked afterwards for the other documents, since 0 times infinity is not 0.

Backward, with E_ij = exp(S_i - S_j) where i sees j and dh the gradient of h_out:

    dv_j = sum_i E_ij (q_i . k_j) dy_i + exp(S_T - S_j) dh^T k_j
    dq_i = sum_j E_ij (dy_i . v_j) k_j + exp(S_i) h_in dy_i
    dk_j = sum_i E_ij (dy_i . v_j) q_i + exp(S_T - S_j) dh v_j
    dh_in = exp(S_T) dh + sum_i exp(S_i) q_i dy_i^T
    dg_t = sum over pairs i >= t > j of E_ij (q_i . k_j) (dy_i . v_j)                       pairs across t
           + sum_{i >= t} exp(S_i) dy_i . h_in^T q_i + sum_{j < t} exp(S_T - S_j) v_j . dh^T k_j + exp(S_T) dh . h_in

as g_t is in S_i for all i >= t, and in S_T - S_j for all j < t. The code computes the sum over pairs as the sum over
all i >= t minus the sum over all j >= t ("gain"), in which pairs with both tokens at or after t cancel.

Heads of a group share q and k, so most products are computed once per group. If a token sees itself with another step
than later tokens see it, the first sums of y and of the gradients are over j < i alone, and the caller adds the token's
own part.

Not here: the computation of q, k, v and g (`chunked`), and one decay per channel (`gla`), whose exponents can't be
taken out of the product of q and k.

Legend: B rows, T tokens of the chunk, G groups, R heads of a group, H = G R heads, N key size, P value size, V = R P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """Visibility masks of a chunk's tokens; without document boundaries the last three are None."""

    tokens_BTT: Tensor  # i sees j: j <= i, and j is in i's document
    first_BT: Tensor | None = None  # in the document of the state before the chunk
    last_BT: Tensor | None = None  # in the document of the state after the chunk
    through_B1: Tensor | None = None  # both states are in the same document

    @staticmethod
    def of(length: int, device: torch.device, starts_BT: Tensor | None) -> Sight:
        """Build the masks of `length` tokens; `starts_BT` marks the tokens that begin a document."""
        before_1TT = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        if starts_BT is None:
            return Sight(before_1TT)
        document_BT = starts_BT.cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        last_B1 = document_BT[:, -1:]
        return Sight(before_1TT & same_BTT, document_BT == 0, document_BT == last_B1, last_B1 == 0)


def decays(exponent: Tensor, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return exp(exponent) where `seen` is True or None, else 0.

    Results that are too small to matter become 0 without exp of -inf or denormal numbers: on a CPU these, and products
    with them, take many times as long as others.
    """
    exponent = exponent.to(dtype, copy=True)
    if seen is not None:
        exponent += torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    limits = torch.finfo(dtype)
    smallest = limits.tiny / limits.eps
    exponent.clamp_(min=math.log(smallest) - 1).exp_()
    return F.threshold(exponent, smallest, 0.0, inplace=True)


class DecayGradients(NamedTuple):
    """Gradients of a chunk's inputs and the state before it."""

    q_BGTN: Tensor
    k_BGTN: Tensor
    v_BGTV: Tensor
    g_BGRT: Tensor
    state_BGNV: Tensor


class DecayChunk:
    """T tokens, with outputs and gradients computed from the state before them.

    If `see_themselves` is False, y leaves out each token's own part, where j = i.
    """

    def __init__(
        self, q_BGTN: Tensor, k_BGTN: Tensor, v_BGTV: Tensor, g_BGRT: Tensor, sight: Sight, see_themselves: bool = True
    ) -> None:
        self.q_BGTN = q_BGTN
        self.k_BGTN = k_BGTN
        self.v_BGTV = v_BGTV
        self.sight = sight
        if see_themselves:
            self.seen_BTT = sight.tokens_BTT
        else:
            self.seen_BTT = sight.tokens_BTT.tril(-1)
        self.heads = g_BGRT.shape[2]
        self.sum_BGRT = self._over_tokens(g_BGRT.double(), sight.tokens_BTT.mT)
        last_BGR1 = self.sum_BGRT[..., -1:]
        self.since_start_BGRT = decays(self.sum_BGRT, _whole(sight.first_BT), v_BGTV.dtype)
        self.to_end_BGRT = decays(last_BGR1 - self.sum_BGRT, _whole(sight.last_BT), v_BGTV.dtype)
        self.whole_BGR = decays(last_BGR1, _whole(sight.through_B1), v_BGTV.dtype)[..., 0]

    def outputs(self, state_BGNV: Tensor) -> Tensor:
        """Return y of every token (B, G, T, V)."""
        y_BGRTP = (self.scores().unsqueeze(2) * self.between()) @ self._by_head(self.v_BGTV)
        y_BGTV = self._seen_state(state_BGNV)
        self._of_heads(y_BGTV).add_(y_BGRTP.transpose(2, 3))
        return y_BGTV

    def next_state(self, state_BGNV: Tensor) -> Tensor:
        """Return the state after the last token."""
        kept_BGNV = self._times(state_BGNV, self.whole_BGR.unsqueeze(2))
        if self.sight.through_B1 is not None:
            kept_BGNV.masked_fill_(~self.sight.through_B1[:, None, None], 0)
        return kept_BGNV.add_(self.k_BGTN.mT @ self._times(self.v_BGTV, self.to_end_BGRT.mT))

    def backward(
        self, state_BGNV: Tensor, grad_y_BGTV: Tensor, grad_state_BGNV: Tensor, of_own_scores_BTH: Tensor | None = None
    ) -> DecayGradients:
        """Return the gradients of all inputs and the state before the chunk.

        `grad_state_BGNV` is the gradient of the state after the chunk, `of_own_scores_BTH` that of each token's own
        q . k, which is given if y leaves out the tokens' own parts.
        """
        grad_scores_BGTT, grad_v_BGTV, gain_BGRT = self._backward_within(grad_y_BGTV)
        if of_own_scores_BTH is not None:
            of_own_BTG = of_own_scores_BTH.unflatten(2, (-1, self.heads)).sum(3)
            grad_scores_BGTT.diagonal(dim1=2, dim2=3).copy_(of_own_BTG.mT)
        seen_BGTV = self._seen_state(state_BGNV)
        gain_BGRT += self._of_heads(seen_BGTV.mul_(grad_y_BGTV)).sum(-1).mT
        decayed_grad_BGTV = self._times(grad_y_BGTV, self.since_start_BGRT.mT)
        grad_q_BGTN = grad_scores_BGTT @ self.k_BGTN + decayed_grad_BGTV @ state_BGNV.mT

        decayed_v_BGTV = self._times(self.v_BGTV, self.to_end_BGRT.mT)
        grad_k_BGTN = grad_scores_BGTT.mT @ self.q_BGTN + decayed_v_BGTV @ grad_state_BGNV.mT
        to_state_BGTV = self.k_BGTN @ grad_state_BGNV
        loss_BGRT = self._of_heads(decayed_v_BGTV.mul_(to_state_BGTV)).sum(-1).mT
        grad_v_BGTV += self._times(to_state_BGTV, self.to_end_BGRT.mT)

        grad_before_BGNV = self._times(grad_state_BGNV, self.whole_BGR.unsqueeze(2))
        through_BGR = self._of_heads(grad_before_BGNV * state_BGNV).sum((2, 4))
        grad_before_BGNV += self.q_BGTN.mT @ decayed_grad_BGTV
        # g_t is in S_i of all i >= t, and in the decays from all j < t to the state after the chunk
        sees_BTT = self.sight.tokens_BTT
        grad_g_BGRT = self._over_tokens(gain_BGRT.double(), sees_BTT) + through_BGR.unsqueeze(-1)
        grad_g_BGRT += self._over_tokens(loss_BGRT.double(), sees_BTT.tril(-1).mT)
        return DecayGradients(grad_q_BGTN, grad_k_BGTN, grad_v_BGTV, grad_g_BGRT, grad_before_BGNV)

    def _backward_within(self, grad_y_BGTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the scores, v and S through the token pairs in the chunk."""
        grad_y_BGRTP = self._by_head(grad_y_BGTV)
        between_BGRTT = self.between()
        scores_BG1TT = self.scores().unsqueeze(2)
        grad_v_BGRTP = (scores_BG1TT * between_BGRTT).mT @ grad_y_BGRTP
        grad_mix_BGRTT = (grad_y_BGRTP @ self._by_head(self.v_BGTV).mT).mul_(between_BGRTT)
        grad_scores_BGTT = grad_mix_BGRTT.sum(2)
        grad_exponent_BGRTT = grad_mix_BGRTT.mul_(scores_BG1TT)
        grad_exponent_BGRTT.diagonal(dim1=-2, dim2=-1).zero_()  # S_i - S_i does not depend on g
        # in float64, since pairs whose tokens are both at or after t cancel in the gradient of g_t
        gain_BGRT = grad_exponent_BGRTT.sum(-1, dtype=torch.float64) - grad_exponent_BGRTT.sum(-2, dtype=torch.float64)
        return grad_scores_BGTT, grad_v_BGRTP.transpose(2, 3).flatten(3), gain_BGRT

    def scores(self) -> Tensor:
        """Return q_i . k_j (B, G, T, T)."""
        return self.q_BGTN @ self.k_BGTN.mT

    def between(self) -> Tensor:
        """Return exp(S_i - S_j) where i sees j, else 0 (B, G, R, T, T)."""
        exponent_BGRTT = self.sum_BGRT.unsqueeze(-1) - self.sum_BGRT.unsqueeze(-2)
        return decays(exponent_BGRTT, self.seen_BTT[:, None, None], self.v_BGTV.dtype)

    def _seen_state(self, state_BGNV: Tensor) -> Tensor:
        """Return the part of y that comes from the state before the chunk."""
        seen_BGTV = self.q_BGTN @ state_BGNV
        self._of_heads(seen_BGTV).mul_(self.since_start_BGRT.mT.unsqueeze(-1))
        if self.sight.first_BT is not None:
            seen_BGTV.masked_fill_(~self.sight.first_BT[:, None, :, None], 0)
        return seen_BGTV

    def _of_heads(self, x_BGTV: Tensor) -> Tensor:
        """Return a view with the heads of a group on their own axis, (B, G, T, R, P)."""
        return x_BGTV.unflatten(-1, (self.heads, -1))

    def _by_head(self, x_BGTV: Tensor) -> Tensor:
        """Return a view with heads before tokens, (B, G, R, T, P)."""
        return self._of_heads(x_BGTV).transpose(2, 3)

    def _times(self, x_BGTV: Tensor, factor_BGTR: Tensor) -> Tensor:
        """Multiply each head's values by its factor."""
        return (self._of_heads(x_BGTV) * factor_BGTR.unsqueeze(-1)).flatten(3)

    def _over_tokens(self, x_BGRT: Tensor, weight_BTT: Tensor) -> Tensor:
        """Sum over the tokens that a boolean matrix selects: sum_i x_i weight_ij."""
        x_BHT = x_BGRT.flatten(1, 2)
        return torch.bmm(x_BHT, weight_BTT.to(x_BHT.dtype).expand(len(x_BHT), -1, -1)).view_as(x_BGRT)


def _whole(seen_BT: Tensor | None) -> Tensor | None:
    if seen_BT is None:
        return None
    return seen_BT[:, None, None]
