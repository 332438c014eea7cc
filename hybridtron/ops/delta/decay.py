"""Decays between the tokens of a chunk in the delta rule, and the scores that contain them.

A chunk is a range of consecutive tokens of a sequence (`chunked.py`). Let S_i be the sum of the log decays g over the
tokens of i's document in the chunk, up to i itself. (In the names of tensors, S is an axis, not this sum.)

Token i reads the state with two readers r_i: its query and its key. The key reads the value that the state stores for
it. Token i sees token j if j <= i, and both are in the same document. For each kind of reader (queries or keys), the
score of a reader r_i with a key k_j that i sees is

    A_ij = sum_n r_in k_jn exp(S_in - S_jn)

If i does not see j, the score is 0. (For the kind "keys", the caller also sets A_ii to 0.) Both kinds of score have a
gradient dA. The gradients through the scores are

    dr_in = sum_j dA_ij k_jn exp(S_in - S_jn)                              for each kind
    dk_jn = sum over both kinds of sum_i dA_ij r_in exp(S_in - S_jn)
    dS_in = (sum over both kinds of r_in dr_in) - k_in dk_in

The sums over i and j cover the pairs in which i sees j.

With one g per head (`HeadDecay`), S_in is equal for all n. The dot products r_i . k_j are then multiplied by a T x T
matrix of decays. Let D be the elementwise product of A and dA, summed over both kinds. Then dS_i, the sum of dS_in over
n, is the sum of D's row i minus the sum of D's column i.

g_t is a term in S_i for all i >= t in t's document, so the gradient for g_t contains the sum of dS_i over these i. An
entry D_ij with i >= t and j >= t is added once and subtracted once in this sum. Only entries with j < t <= i remain,
and their sum may be much smaller than the entries that cancel. Sums over D are therefore float64: in fp32, rounding
errors of the cancelled entries would remain.

With one g per key channel (`ChannelDecay`), the decays are inside the sum over n. A can't be computed as r exp(S) times
k exp(-S), since exp(-S) overflows after a few strong decays. Therefore the chunk is divided into blocks with SUB tokens
(`ops/gla/decay.py`). For a token i in a block that begins with token f, and a token j before this block,

    A_ij = sum_n (r_in exp(S_in - S_fn)) (k_jn exp(S_fn - S_jn))

Both exponents are at most 0, since g <= 0. For two tokens in the same block, exp(S_in - S_jn) is computed for each pair
of tokens. S is float64.

Legend: B rows (sequences in the batch), H heads, N key channels n, G = N or 1 (a decay per key channel or per head), T
tokens per chunk, S tokens per block, K tokens that precede the block in its chunk. An axis of size 2 has the two kinds
of reader: queries, then keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.gla.decay import ChunkDecay, DecayBlock
from hybridtron.ops.ssd.decay import VisibilityMask, decays


class PairGradients(NamedTuple):
    """Gradients through the scores: dr for both kinds of reader (`read`), dk (`k`) and dS (`sum`)."""

    read_2BHTN: Tensor
    k_BHTN: Tensor
    sum_BHTG: Tensor  # float64


class DeltaDecay(ChunkDecay):
    """Decays in a chunk. Subclasses compute the scores, since scores contain the decays between two tokens."""

    def scores(self, read_2BHTN: Tensor, k_BHTN: Tensor) -> Tensor:
        """Return the scores A (2, B, H, T, T); A_ij is 0 if i does not see j."""
        raise NotImplementedError

    def backward(self, grad_2BHTT: Tensor, read_2BHTN: Tensor, k_BHTN: Tensor, scores_2BHTT: Tensor) -> PairGradients:
        """Return dr, dk and dS, given the gradients dA of the scores (2, B, H, T, T), and the scores A."""
        raise NotImplementedError

    def by_gate(self, x_BHTN: Tensor) -> Tensor:
        """Convert x to float64, and to the shape of g: if a head has one decay, x is summed over its key channels."""
        x_BHTN = x_BHTN.double()
        if self.sum_BHTG.shape[3] == 1:
            return x_BHTN.sum(-1, keepdim=True)
        return x_BHTN

    def grad_g(self, gain_BHTG: Tensor, loss_BHTG: Tensor, through_BH1G: Tensor) -> Tensor:
        """Return the gradient for g.

        gain_BHTG: gradient for S_i, from the scores and from token i's reads of the state before the chunk
        loss_BHTG: gradient for S_T - S_j, from key j's contribution to the state after the chunk (T: last token)
        through_BH1G: gradient for S_T, from the state before the chunk, which decays over the full chunk

        Within a document, g_t is a term in S_i for all i >= t, and in S_T - S_j for all j < t.
        """
        sees_B1TT = self.sees_B1TT.double()
        grad_g_BHTG = sees_B1TT.mT @ gain_BHTG + sees_B1TT.tril(-1) @ loss_BHTG
        return grad_g_BHTG + through_BH1G


class HeadDecay(DeltaDecay):
    """Decays with one g per head."""

    def __init__(self, g_BHT1: Tensor, visibility: VisibilityMask, dtype: torch.dtype) -> None:
        super().__init__(g_BHT1, visibility, dtype)
        self.between_BHTT = decays(self.sum_BHTG - self.sum_BHTG.mT, self.sees_B1TT, dtype)

    def scores(self, read_2BHTN: Tensor, k_BHTN: Tensor) -> Tensor:
        return (read_2BHTN @ k_BHTN.mT).mul_(self.between_BHTT)

    def backward(self, grad_2BHTT: Tensor, read_2BHTN: Tensor, k_BHTN: Tensor, scores_2BHTT: Tensor) -> PairGradients:
        of_sums_BHTT = (grad_2BHTT * scores_2BHTT).sum(0)
        gain_BHT = of_sums_BHTT.sum(-1, dtype=torch.float64) - of_sums_BHTT.sum(-2, dtype=torch.float64)
        grad_2BHTT = grad_2BHTT * self.between_BHTT
        grad_k_BHTN = (grad_2BHTT.mT @ read_2BHTN).sum(0)
        return PairGradients(grad_2BHTT @ k_BHTN, grad_k_BHTN, gain_BHT.unsqueeze(-1))


class ChannelDecay(DeltaDecay):
    """Decays with one g per key channel."""

    def __init__(self, g_BHTN: Tensor, visibility: VisibilityMask, dtype: torch.dtype) -> None:
        super().__init__(g_BHTN, visibility, dtype)
        self.kept_blocks = list(self.blocks())  # used by the forward and the backward pass

    def scores(self, read_2BHTN: Tensor, k_BHTN: Tensor) -> Tensor:
        length = k_BHTN.shape[2]
        scores_2BHTT = read_2BHTN.new_zeros(*read_2BHTN.shape[:3], length, length)
        for block in self.kept_blocks:
            read_2BHSN, k_BHKN, k_BHSSN = self._seen_in(block, read_2BHTN, k_BHTN)
            scores_2BHTT[..., block.tokens, block.past] = (read_2BHSN * block.from_first_BHSN) @ k_BHKN.mT
            scores_2BHTT[..., block.tokens, block.tokens] = (k_BHSSN @ read_2BHSN.unsqueeze(-1)).squeeze(-1)
        return scores_2BHTT

    def backward(self, grad_2BHTT: Tensor, read_2BHTN: Tensor, k_BHTN: Tensor, scores_2BHTT: Tensor) -> PairGradients:
        grad_read_2BHTN = torch.empty_like(read_2BHTN)
        grad_k_BHTN = torch.zeros_like(k_BHTN)
        for block in self.kept_blocks:
            tokens = block.tokens
            past = block.past
            from_first_BHSN = block.from_first_BHSN
            read_2BHSN, k_BHKN, k_BHSSN = self._seen_in(block, read_2BHTN, k_BHTN)
            grad_2BHSK = grad_2BHTT[..., tokens, past]
            grad_2BHSS = grad_2BHTT[..., tokens, tokens]
            of_inside_2BHSN = (grad_2BHSS.unsqueeze(-2) @ k_BHSSN).squeeze(-2)
            grad_read_2BHTN[..., tokens, :] = from_first_BHSN * (grad_2BHSK @ k_BHKN) + of_inside_2BHSN
            of_past_BHKN = (grad_2BHSK.mT @ (read_2BHSN * from_first_BHSN)).sum(0)
            grad_k_BHTN[:, :, past] += of_past_BHKN * block.to_first_BHKN
            of_pairs_2BHSSN = grad_2BHSS.unsqueeze(-1) * read_2BHSN.unsqueeze(-2)
            grad_k_BHTN[:, :, tokens] += (of_pairs_2BHSSN.sum(0) * block.inside_BHSSN).sum(2)
        gain_BHTN = (read_2BHTN.double() * grad_read_2BHTN).sum(0) - k_BHTN.double() * grad_k_BHTN
        return PairGradients(grad_read_2BHTN, grad_k_BHTN, gain_BHTN)

    def _seen_in(self, block: DecayBlock, read_2BHTN: Tensor, k_BHTN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's readers, the decayed keys before the block, and the block's own decayed keys.

        Keys before the block are decayed up to the block's first token. The block's own keys are decayed up to each
        token of the block, so their tensor has two axes of tokens: reader i, then key j.
        """
        k_BHSN = k_BHTN[:, :, block.tokens]
        return (
            read_2BHTN[..., block.tokens, :],
            k_BHTN[:, :, block.past] * block.to_first_BHKN,
            k_BHSN.unsqueeze(2) * block.inside_BHSSN,
        )
