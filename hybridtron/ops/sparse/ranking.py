"""What keys are scored by, and the loss by which scores learn to order keys as attention would.

Of each row some tokens are candidates, with scores x. What their keys are worth the queries say that may see them:

    y_j = sum over the queries i >= j of the document of  sigmoid(q_i . k_j);    `mean` divides by their number
    loss = mean over pairs i, j of candidates of a document of  BCE(x_i - x_j, T_ij)
    T_ij = 1 where y_i > y_j, 1/2 where they are equal, else 0

Under `sum`, as in published code, early keys have more queries and so are worth more; under `mean` they are not.

Legend as in `reference`, C candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


@torch.no_grad()
def query_directions(q_RLN: Tensor, documents_RL: Tensor, before_RN: Tensor) -> tuple[Tensor, Tensor]:
    """normalize(sum of the queries of the document so far) of every token, and the last sum; in fp32 at least.

    `before_RN` is the sum over what came before the row of its first document.
    """
    wide_RLN = at_least_fp32(q_RLN)
    wide_RLN = torch.cat((wide_RLN[:, :1] + before_RN[:, None].to(wide_RLN.dtype), wide_RLN[:, 1:]), dim=1)
    sums_RLN = (doubled_sums if q_RLN.is_cuda else document_sums)(wide_RLN, documents_RL)
    return F.normalize(sums_RLN, dim=-1), sums_RLN[:, -1]


def document_sums(x_RLN: Tensor, documents_RL: Tensor) -> Tensor:
    """Running sums, token after token: each document by itself, as differences of sums would mix their bits."""
    number_RL = (documents_RL[:, 1:] != documents_RL[:, :-1]).cumsum(1)
    number_RL1 = F.pad(number_RL, (1, 0))[..., None]
    sums_RLN = torch.zeros_like(x_RLN)
    for number in range(int(number_RL1.max()) + 1):
        here_RL1 = number_RL1 == number
        sums_RLN = torch.where(here_RL1, torch.where(here_RL1, x_RLN, 0.0).cumsum(1), sums_RLN)
    return sums_RLN


def doubled_sums(x_RLN: Tensor, documents_RL: Tensor) -> Tensor:
    """The same in another order, of twice as many tokens each turn: how many documents there are is not asked."""
    reach = 1
    while reach < x_RLN.shape[1]:
        same_RL1 = (documents_RL[:, reach:] == documents_RL[:, :-reach])[..., None]
        added_RLN = x_RLN[:, reach:] + torch.where(same_RL1, x_RLN[:, :-reach], 0.0)
        x_RLN = torch.cat((x_RLN[:, :reach], added_RLN), dim=1)
        reach *= 2
    return x_RLN


def candidates(seed: int, rows: int, length: int, most: int, device: torch.device) -> Tensor:
    """Random tokens of each row, (R, C) in int64: a function of the seed."""
    numbers_RL = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed >> 1), dtype=torch.float64)
    return numbers_RL.topk(min(most, length), dim=-1).indices.to(device, non_blocking=True)


@torch.no_grad()
def worth_of_keys(
    q_RLN: Tensor, documents_RL: Tensor, first: int, k_RCN: Tensor, documents_RC: Tensor, chosen_RC: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum in y of every candidate, and of how many queries it is, (R, C); the first query has place `first`."""
    places_L = torch.arange(first, first + q_RLN.shape[1], device=q_RLN.device)
    asks_RLC = (places_L[:, None] >= chosen_RC[:, None]) & (documents_RL[..., None] == documents_RC[:, None])
    worth_RLC = torch.sigmoid(at_least_fp32(q_RLN) @ at_least_fp32(k_RCN).mT) * asks_RLC
    return worth_RLC.sum(1), asks_RLC.sum(1)


def ranking_loss(scores_RC: Tensor, worth_RC: Tensor, documents_RC: Tensor) -> Tensor:
    """The mean over the pairs of a row that are of one document, and over rows."""
    logits_RCC = scores_RC[:, :, None] - scores_RC[:, None]
    larger_RCC = torch.sign(worth_RC[:, :, None] - worth_RC[:, None])
    losses_RCC = F.binary_cross_entropy_with_logits(logits_RCC, (larger_RCC + 1) / 2, reduction="none")
    same_RCC = documents_RC[:, :, None] == documents_RC[:, None]
    return ((losses_RCC * same_RCC).sum((1, 2)) / same_RCC.sum((1, 2))).mean()
