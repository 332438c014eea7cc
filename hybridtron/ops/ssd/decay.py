"""The recurrence with one log decay per head, computed one chunk of tokens at a time; SSD and similar ops use it.

    h_t = exp(g_t) h_{t-1} + k_t v_t^T,   y_t = h_t^T q_t,   g_t <= 0          (Dao and Gu 2024, section 6)

S_i is g summed over the tokens of i's document in the chunk, up to i itself. T is the chunk's last token. h_in and
h_out are the states before and after the chunk:

    y_i   = sum_{j <= i} exp(S_i - S_j) (q_i . k_j) v_j + exp(S_i) h_in^T q_i
    h_out = exp(S_T) h_in + sum_j exp(S_T - S_j) k_j v_j^T

Documents are kept apart. The sum in y_i covers only tokens j in i's document. Only tokens in the chunk's first document
see h_in, and only tokens in its last document contribute to h_out. For all other tokens the factors exp(..) are
replaced by 0 (`decays`). Products with h_in are then set to 0 too, since 0 times infinity is NaN.

Sums of g are float64. In fp32, a few strong decays would make the sum large, and its rounding would hide the small
decays after them.

In the backward pass, E_ij is exp(S_i - S_j) if i sees j, else 0, and dh is the gradient of h_out:

    dv_j = sum_i E_ij (q_i . k_j) dy_i + exp(S_T - S_j) dh^T k_j
    dq_i = sum_j E_ij (dy_i . v_j) k_j + exp(S_i) h_in dy_i
    dk_j = sum_i E_ij (dy_i . v_j) q_i + exp(S_T - S_j) dh v_j
    dh_in = exp(S_T) dh + sum_i exp(S_i) q_i dy_i^T
    dg_t = sum_{i >= t > j} E_ij (q_i . k_j) (dy_i . v_j)                       pairs across t
           + sum_{i >= t} exp(S_i) dy_i . h_in^T q_i + sum_{j < t} exp(S_T - S_j) v_j . dh^T k_j + exp(S_T) dh . h_in

The sums in dg_t follow because g_t is contained in S_i for all i >= t, and in S_T - S_j for all j < t. The code
computes the sum over pairs across t as the sum over all pairs with i >= t minus the sum over all pairs with j >= t
(`gain`). Pairs with both tokens at or after t cancel in this difference.

Heads in a group share q and k, so q_i . k_j is computed once per group. In Mamba-3, a token has one factor for itself
and another factor for later tokens. In this case, the first sums in y and in the gradients cover only j < i, and the
caller adds the term j = i.

`chunked` computes q, k, v and g. The ops `gla` and `delta` use only `VisibilityMask` and `decays` from this file, since
a decay per key channel cannot be factored out of q_i . k_j.

Legend: B rows (sequences in a batch), T tokens per chunk, G groups, R heads per group, H = G * R heads, N key size, P
value size, V = R * P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class VisibilityMask:
    """Visibility masks for a chunk's tokens; without document boundaries only `tokens_BTT` is given."""

    tokens_BTT: Tensor  # True where i sees j: j <= i, and j is in i's document
    first_BT: Tensor | None = None  # True for tokens in the document of the state before the chunk
    last_BT: Tensor | None = None  # True for tokens in the document of the state after the chunk
    through_B1: Tensor | None = None  # True if both states belong to the same document

    @staticmethod
    def of(length: int, device: torch.device, starts_BT: Tensor | None) -> VisibilityMask:
        """Build the masks for `length` tokens; `starts_BT` marks the tokens that begin a document."""
        before_1TT = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        if starts_BT is None:
            return VisibilityMask(before_1TT)
        document_BT = starts_BT.cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        last_B1 = document_BT[:, -1:]
        return VisibilityMask(before_1TT & same_BTT, document_BT == 0, document_BT == last_B1, last_B1 == 0)


def decays(exponent: Tensor, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return exp(exponent) where `seen` is True, else 0; if `seen` is None, return exp(exponent) everywhere.

    Very small results are set to 0. exp is never called with -inf, and the result never contains denormal numbers: on a
    CPU, exp(-inf) and operations on denormal numbers take many times as long as operations on other numbers.
    """
    exponent = exponent.to(dtype, copy=True)
    if seen is not None:
        exponent += torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    limits = torch.finfo(dtype)
    smallest = limits.tiny / limits.eps
    exponent.clamp_(min=math.log(smallest) - 1).exp_()
    return F.threshold(exponent, smallest, 0.0, inplace=True)


class DecayGradients(NamedTuple):
    """Gradients of a chunk's inputs, and of the state before the chunk."""

    q_BGTN: Tensor
    k_BGTN: Tensor
    v_BGTV: Tensor
    g_BGRT: Tensor
    state_BGNV: Tensor


class DecayChunk:
    """The inputs for T tokens, with methods that compute outputs and gradients, given the state before the tokens.

    If `see_themselves` is False, y lacks the term j = i.
    """

    def __init__(
        self,
        q_BGTN: Tensor,
        k_BGTN: Tensor,
        v_BGTV: Tensor,
        g_BGRT: Tensor,
        visibility: VisibilityMask,
        see_themselves: bool = True,
    ) -> None:
        self.q_BGTN = q_BGTN
        self.k_BGTN = k_BGTN
        self.v_BGTV = v_BGTV
        self.visibility = visibility
        if see_themselves:
            self.seen_BTT = visibility.tokens_BTT
        else:
            self.seen_BTT = visibility.tokens_BTT.tril(-1)
        self.heads = g_BGRT.shape[2]
        self.sum_BGRT = self._over_tokens(g_BGRT.double(), visibility.tokens_BTT.mT)
        last_BGR1 = self.sum_BGRT[..., -1:]
        self.since_start_BGRT = decays(self.sum_BGRT, _whole(visibility.first_BT), v_BGTV.dtype)
        self.to_end_BGRT = decays(last_BGR1 - self.sum_BGRT, _whole(visibility.last_BT), v_BGTV.dtype)
        self.whole_BGR = decays(last_BGR1, _whole(visibility.through_B1), v_BGTV.dtype)[..., 0]

    def outputs(self, state_BGNV: Tensor) -> Tensor:
        """Return every token's y (B, G, T, V)."""
        y_BGRTP = (self.scores().unsqueeze(2) * self.between()) @ self._by_head(self.v_BGTV)
        y_BGTV = self._seen_state(state_BGNV)
        self._of_heads(y_BGTV).add_(y_BGRTP.transpose(2, 3))
        return y_BGTV

    def next_state(self, state_BGNV: Tensor) -> Tensor:
        """Return the state after the last token."""
        kept_BGNV = self._times(state_BGNV, self.whole_BGR.unsqueeze(2))
        if self.visibility.through_B1 is not None:
            kept_BGNV.masked_fill_(~self.visibility.through_B1[:, None, None], 0)
        return kept_BGNV.add_(self.k_BGTN.mT @ self._times(self.v_BGTV, self.to_end_BGRT.mT))

    def backward(
        self, state_BGNV: Tensor, grad_y_BGTV: Tensor, grad_state_BGNV: Tensor, of_own_scores_BTH: Tensor | None = None
    ) -> DecayGradients:
        """Return the gradients of all inputs and the state before the chunk.

        `grad_state_BGNV` is the gradient of the state after the chunk. If y lacks the term j = i, the caller passes
        `of_own_scores_BTH`: the gradient of each token's q_i . k_i through the term that the caller has added.
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
        sees_BTT = self.visibility.tokens_BTT
        grad_g_BGRT = self._over_tokens(gain_BGRT.double(), sees_BTT) + through_BGR.unsqueeze(-1)
        grad_g_BGRT += self._over_tokens(loss_BGRT.double(), sees_BTT.tril(-1).mT)
        return DecayGradients(grad_q_BGTN, grad_k_BGTN, grad_v_BGTV, grad_g_BGRT, grad_before_BGNV)

    def _backward_within(self, grad_y_BGTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q_i . k_j, of v and of S through the pairs of tokens in the chunk."""
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
        if self.visibility.first_BT is not None:
            seen_BGTV.masked_fill_(~self.visibility.first_BT[:, None, :, None], 0)
        return seen_BGTV

    def _of_heads(self, x_BGTV: Tensor) -> Tensor:
        """Return a view with a group's heads on their own axis, (B, G, T, R, P)."""
        return x_BGTV.unflatten(-1, (self.heads, -1))

    def _by_head(self, x_BGTV: Tensor) -> Tensor:
        """Return a view with heads before tokens, (B, G, R, T, P)."""
        return self._of_heads(x_BGTV).transpose(2, 3)

    def _times(self, x_BGTV: Tensor, factor_BGTR: Tensor) -> Tensor:
        """Return x with each head's channels multiplied by the head's factor."""
        return (self._of_heads(x_BGTV) * factor_BGTR.unsqueeze(-1)).flatten(3)

    def _over_tokens(self, x_BGRT: Tensor, weight_BTT: Tensor) -> Tensor:
        """Return sum_i x_i weight_ij for every token j; `weight_BTT` is a boolean matrix."""
        x_BHT = x_BGRT.flatten(1, 2)
        return torch.bmm(x_BHT, weight_BTT.to(x_BHT.dtype).expand(len(x_BHT), -1, -1)).view_as(x_BGRT)


def _whole(seen_BT: Tensor | None) -> Tensor | None:
    if seen_BT is None:
        return None
    return seen_BT[:, None, None]
