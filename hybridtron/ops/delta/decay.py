"""Decays within a chunk of the delta rule, and the scores between its tokens, which contain them.

With S_i the sum of g over the tokens of i's document in the chunk, up to i itself, readers r (queries, and keys that
look up their stored value) see the keys k of their document's tokens, up to their own, by

    A_ij = sum over n of r_in k_jn exp(S_in - S_jn)        backward:  dr_i = sum_j dA_ij k_j exp(S_i - S_j)
                                                                      dk_j = sum_i dA_ij r_i exp(S_i - S_j)

The gradient of S_i gains r_i dr_i through the pairs that i reads, and that of S_j loses k_j dk_j through the pairs that
read j.

With one g for a head (`HeadDecay`) the decays are a factor of the scores, one T x T matrix, and the gradient of S is
the row sums of A dA less its column sums: the same numbers twice, so that terms that cancel leave nothing behind.
With one for each key channel (`ChannelDecay`) they stand inside the sum over n. A can't then be computed as the product
of r exp(S) and k exp(-S), as exp(-S) overflows after a few strong decays. So a chunk is cut into blocks of SUB tokens.
Between the tokens i of a block that begins with f, and all j before the block,

    A_ij = (r_i exp(S_i - S_f)) . (k_j exp(S_f - S_j))

is a product with no exponent above 0, and inside a block every pair of tokens has its own exponents. S is float64, and
pairs that do not see each other are masked in the exponent.

Legend: as in `reference`; T tokens of one chunk, S of one block, K tokens before it; 2: queries and keys, as readers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.gla.decay import ChunkDecay, DecayBlock
from hybridtron.ops.ssd.decay import Sight, decays


class PairGradients(NamedTuple):
    """Gradients through the pairs of tokens: those of readers, of keys, and of S."""

    read_2BHTN: Tensor
    k_BHTN: Tensor
    sum_BHTG: Tensor  # float64


class DeltaDecay(ChunkDecay):
    """Decays of a chunk, to which subclasses add those between pairs of tokens."""

    def scores(self, read_2BHTN: Tensor, k_BHTN: Tensor) -> Tensor:
        """Return the scores A (2, B, H, T, T), 0 where nothing is seen."""
        raise NotImplementedError

    def backward(self, grad_2BHTT: Tensor, read_2BHTN: Tensor, k_BHTN: Tensor, scores_2BHTT: Tensor) -> PairGradients:
        """Return the gradients through the pairs, given those of the scores."""
        raise NotImplementedError

    def by_gate(self, x_BHTN: Tensor) -> Tensor:
        """Return terms of g's gradient in g's shape, as float64: by key channel, or summed over a head's channels."""
        x_BHTN = x_BHTN.double()
        if self.sum_BHTG.shape[3] == 1:
            return x_BHTN.sum(-1, keepdim=True)
        return x_BHTN

    def grad_g(self, gain_BHTG: Tensor, loss_BHTG: Tensor, through_BH1G: Tensor) -> Tensor:
        """Add up the three parts of g's gradient.

        `gain_BHTG` is the gradient of S through reading, `loss_BHTG` that of S_T - S_j through writing to the state
        after the chunk, and `through_BH1G` belongs to the state that decays through the full chunk. g_t is in S_i for t
        and all tokens after it, and in S_T - S_j for the tokens j before it.
        """
        sees_B1TT = self.sees_B1TT.double()
        grad_g_BHTG = sees_B1TT.mT @ gain_BHTG + sees_B1TT.tril(-1) @ loss_BHTG
        return grad_g_BHTG + through_BH1G


class HeadDecay(DeltaDecay):
    """One decay for all key channels of a head."""

    def __init__(self, g_BHT1: Tensor, sight: Sight, dtype: torch.dtype) -> None:
        super().__init__(g_BHT1, sight, dtype)
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
    """A decay for each key channel."""

    def __init__(self, g_BHTN: Tensor, sight: Sight, dtype: torch.dtype) -> None:
        super().__init__(g_BHTN, sight, dtype)
        self.kept_blocks = list(self.blocks())  # for backward too

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
        """Return a block's readers and two tensors of decayed keys.

        The keys before the block are decayed to its first token, and its own keys to each of its readers.
        """
        k_BHSN = k_BHTN[:, :, block.tokens]
        return (
            read_2BHTN[..., block.tokens, :],
            k_BHTN[:, :, block.past] * block.to_first_BHKN,
            k_BHSN.unsqueeze(2) * block.inside_BHSSN,
        )
