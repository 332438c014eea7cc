"""Decays within a chunk of tokens, and the blocks into which decays by key channel cut it.

With S_i the sum of g over the tokens of i's document in the chunk, up to i itself, and T the last token, a token reads
the state before the chunk by exp(S_i), writes to the state after it by exp(S_T - S_i), and sees token j by
exp(S_i - S_j). S is float64, and pairs that do not see each other are masked in the exponent.

Legend: as in `reference`; T tokens of one chunk, S of one block, K tokens before it; G the decays of a head, N or 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.ssd.decay import Sight, decays

SUB = 16  # tokens of a block, whose pairs have exponents of their own


class DecayBlock(NamedTuple):
    """A block's tokens, the tokens before it, and the decays between them; 0 where nothing is seen."""

    tokens: slice
    past: slice
    from_first_BHSN: Tensor  # exp(S_i - S_f) for its tokens i, the first of which is f
    to_first_BHKN: Tensor  # exp(S_f - S_j) for the tokens j before it
    inside_BHSSN: Tensor  # exp(S_i - S_j) for its own pairs


class ChunkDecay:
    """Decays of a chunk: from the state before it to each token, and from each token to the state after it.

    They are 0 for tokens of other documents than the state's.
    """

    def __init__(self, g_BHTG: Tensor, sight: Sight, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sees_B1TT = sight.tokens_BTT.unsqueeze(1)
        self.sum_BHTG = self.sees_B1TT.double() @ g_BHTG.double()
        last_BH1G = self.sum_BHTG[:, :, -1:]
        self.since_start_BHTG = self._by_token(self.sum_BHTG, sight.first_BT)
        self.to_end_BHTG = self._by_token(last_BH1G - self.sum_BHTG, sight.last_BT)
        self.whole_BHG1 = self._by_token(last_BH1G, sight.through_B1).mT

    def blocks(self) -> Iterator[DecayBlock]:
        """Yield the chunk's blocks of tokens, from the first to the last; for decays by key channel."""
        length = self.sum_BHTG.shape[2]
        sees_B1TT = self.sees_B1TT
        sum_BHTN = self.sum_BHTG
        for start in range(0, length, SUB):
            tokens = slice(start, min(start + SUB, length))
            past = slice(start)
            first = slice(start, start + 1)
            sum_BHSN = sum_BHTN[:, :, tokens]
            first_BH1N = sum_BHTN[:, :, first]
            # Sums of different documents can't be compared. A token of another document than the block's first token
            # sees nothing before the block.
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
