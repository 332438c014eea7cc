"""The ranking loss, which teaches key scores to order keys as attention would, and the query sums for these scores.

In each row some tokens are candidates, with scores x. The queries that may see a candidate's key give its worth y:

    y_j = sum over the queries i >= j of the document of  sigmoid(q_i . k_j);    `mean` divides by their number
    loss = mean over pairs i, j of candidates of a document of  BCE(x_i - x_j, T_ij)
    T_ij = 1 where y_i > y_j, 1/2 where they are equal, else 0

With `sum`, as in the published code, early keys have more queries and so are worth more; with `mean` they are not.

Legend as in `reference`, C candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


@torch.no_grad()
def query_directions(q_RLN: Tensor, documents_RL: Tensor, before_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's normalized sum of its document's queries so far, and the last sum; in fp32 or float64.

    `before_RN` is the query sum over the tokens of the first document that came before the row.
    """
    wide_RLN = at_least_fp32(q_RLN)
    wide_RLN = torch.cat((wide_RLN[:, :1] + before_RN[:, None].to(wide_RLN.dtype), wide_RLN[:, 1:]), dim=1)
    sums_RLN = (doubled_sums if q_RLN.is_cuda else document_sums)(wide_RLN, documents_RL)
    return F.normalize(sums_RLN, dim=-1), sums_RLN[:, -1]


def document_sums(x_RLN: Tensor, documents_RL: Tensor) -> Tensor:
    """Return running sums over each document's tokens.

    Every document is summed by itself: with differences of a row's sums its bits would depend on other documents.
    """
    number_RL = (documents_RL[:, 1:] != documents_RL[:, :-1]).cumsum(1)
    number_RL1 = F.pad(number_RL, (1, 0))[..., None]
    sums_RLN = torch.zeros_like(x_RLN)
    for number in range(int(number_RL1.max()) + 1):
        here_RL1 = number_RL1 == number
        sums_RLN = torch.where(here_RL1, torch.where(here_RL1, x_RLN, 0.0).cumsum(1), sums_RLN)
    return sums_RLN


def doubled_sums(x_RLN: Tensor, documents_RL: Tensor) -> Tensor:
    """Return running sums over each document's tokens, doubling the number of summed tokens in each pass.

    The order of summation differs from `document_sums`. The host need not know the number of documents.
    """
    reach = 1
    while reach < x_RLN.shape[1]:
        same_RL1 = (documents_RL[:, reach:] == documents_RL[:, :-reach])[..., None]
        added_RLN = x_RLN[:, reach:] + torch.where(same_RL1, x_RLN[:, :-reach], 0.0)
        x_RLN = torch.cat((x_RLN[:, :reach], added_RLN), dim=1)
        reach *= 2
    return x_RLN


def candidates(seed: int, rows: int, length: int, most: int, device: torch.device) -> Tensor:
    """Draw at most `most` random tokens from each row, (R, C) in int64, as a function of the seed."""
    numbers_RL = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed >> 1), dtype=torch.float64)
    return numbers_RL.topk(min(most, length), dim=-1).indices.to(device, non_blocking=True)


@torch.no_grad()
def worth_of_keys(
    q_RLN: Tensor, documents_RL: Tensor, first: int, k_RCN: Tensor, documents_RC: Tensor, chosen_RC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each candidate's sum in y, and its number of queries, both (R, C).

    `chosen_RC` has the candidates' positions in the row; the first query has position `first`.
    """
    places_L = torch.arange(first, first + q_RLN.shape[1], device=q_RLN.device)
    asks_RLC = (places_L[:, None] >= chosen_RC[:, None]) & (documents_RL[..., None] == documents_RC[:, None])
    worth_RLC = torch.sigmoid(at_least_fp32(q_RLN) @ at_least_fp32(k_RCN).mT) * asks_RLC
    return worth_RLC.sum(1), asks_RLC.sum(1)


def ranking_loss(scores_RC: Tensor, worth_RC: Tensor, documents_RC: Tensor) -> Tensor:
    """Return the loss, averaged over the pairs of each row that are in one document, then over rows."""
    logits_RCC = scores_RC[:, :, None] - scores_RC[:, None]
    larger_RCC = torch.sign(worth_RC[:, :, None] - worth_RC[:, None])
    losses_RCC = F.binary_cross_entropy_with_logits(logits_RCC, (larger_RCC + 1) / 2, reduction="none")
    same_RCC = documents_RC[:, :, None] == documents_RC[:, None]
    return ((losses_RCC * same_RCC).sum((1, 2)) / same_RCC.sum((1, 2))).mean()
