"""Decays between the tokens of a chunk and its states, and the blocks in which decays per key channel are computed.

Let S_i be the sum of the log decays g over the tokens of i's document in the chunk, up to i itself. T is the last token
of the chunk. There are three kinds of decay factors:

    exp(S_i)         token i reads the state before the chunk
    exp(S_T - S_j)   token j is added to the state after the chunk
    exp(S_i - S_j)   token i reads token j

S is float64. If i and j, or a token and a state, belong to different documents, the exponent is replaced by -inf. It is
also replaced if j is after i.

Legend: B rows (sequences in the batch), H heads, N key channels, G = N or 1 (a decay per key channel or per head), T
tokens per chunk, S tokens per block, K tokens in the chunk before the block. The axis S is not related to the sums S_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.ssd.decay import VisibilityMask, decays

SUB = 16  # tokens of a block; inside a block, an exponent is computed for each pair of tokens


class DecayBlock(NamedTuple):
    """A block of a chunk's tokens, with decays. A decay is 0 if its later token does not see its earlier token."""

    tokens: slice  # the tokens i of the block; f is the first token
    past: slice  # the tokens j of the chunk before the block
    from_first_BHSN: Tensor  # exp(S_i - S_f)
    to_first_BHKN: Tensor  # exp(S_f - S_j)
    inside_BHSSN: Tensor  # exp(S_i - S_j) where j is also in the block


class ChunkDecay:
    """Decays in a chunk.

    since_start_BHTG: from the state before the chunk to each token
    to_end_BHTG: from each token to the state after the chunk
    whole_BHG1: from the state before the chunk to the state after it

    A decay is 0 if a document begins in between.
    """

    def __init__(self, g_BHTG: Tensor, visibility: VisibilityMask, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sees_B1TT = visibility.tokens_BTT.unsqueeze(1)
        self.sum_BHTG = self.sees_B1TT.double() @ g_BHTG.double()
        last_BH1G = self.sum_BHTG[:, :, -1:]
        self.since_start_BHTG = self._by_token(self.sum_BHTG, visibility.first_BT)
        self.to_end_BHTG = self._by_token(last_BH1G - self.sum_BHTG, visibility.last_BT)
        self.whole_BHG1 = self._by_token(last_BH1G, visibility.through_B1).mT

    def blocks(self) -> Iterator[DecayBlock]:
        """Yield the chunk's blocks, from the first to the last; only for a decay per key channel (G = N)."""
        length = self.sum_BHTG.shape[2]
        sees_B1TT = self.sees_B1TT
        sum_BHTN = self.sum_BHTG
        for start in range(0, length, SUB):
            tokens = slice(start, min(start + SUB, length))
            past = slice(start)
            first = slice(start, start + 1)
            sum_BHSN = sum_BHTN[:, :, tokens]
            first_BH1N = sum_BHTN[:, :, first]
            # If i is in another document than f, S_i - S_f is meaningless, and from_first is masked to 0. This is
            # correct, since then i sees no token before the block.
            yield DecayBlock(
                tokens,
                past,
                decays(sum_BHSN - first_BH1N, sees_B1TT[:, :, tokens, first], self.dtype),
                decays(first_BH1N - sum_BHTN[:, :, past], sees_B1TT[:, :, first, past].mT, self.dtype),
                decays(
                    sum_BHSN.unsqueeze(3) - sum_BHSN.unsqueeze(2),
                    sees_B1TT[:, :, tokens, tokens].unsqueeze(-1),
                    self.dtype,
                ),
            )

    def _by_token(self, exponent_BHTG: Tensor, seen_BT: Tensor | None) -> Tensor:
        return decays(exponent_BHTG, None if seen_BT is None else seen_BT[:, None, :, None], self.dtype)
