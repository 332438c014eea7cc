"""The ranking loss: a small network learns to score keys in the order that attention weights would give them.

Sparse attention selects the keys with the best scores. The network's input is a key and the normalized running sum of
queries; `query_directions` computes these sums. For the loss, some tokens in each row are drawn at random as
candidates. A candidate j has a score x_j and a worth w_j:

    w_j = sigmoid(q_l . k_j), summed over the queries l >= j in the candidate's document
    loss = BCE(x_i - x_j, T_ij), averaged over all pairs (i, j) of candidates in one document
    T_ij = 1 if w_i > w_j, 1/2 if w_i = w_j, else 0

BCE is the binary cross-entropy with logits. As in the published code, w_j is a sum, so early keys are worth more, since
more queries follow them. The mixer may divide w_j by the number of queries in the sum, so that w_j is a mean.

Legend: R rows (a row for each sequence in the batch and each head group), L tokens, N key size, C candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


@torch.no_grad()
def query_directions(q_RLN: Tensor, documents_RL: Tensor, before_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's normalized running sum of queries (R, L, N), and the row's last sum (R, N), not normalized.

    A running sum adds the queries in the token's document up to the token. `before_RN` sums the queries that the row's
    first document has in earlier rows. Results are in fp32 (float64 for float64 inputs).
    """
    wide_RLN = at_least_fp32(q_RLN)
    wide_RLN = torch.cat((wide_RLN[:, :1] + before_RN[:, None].to(wide_RLN.dtype), wide_RLN[:, 1:]), dim=1)
    sums_RLN = (doubled_sums if q_RLN.is_cuda else document_sums)(wide_RLN, documents_RL)
    return F.normalize(sums_RLN, dim=-1), sums_RLN[:, -1]


def document_sums(x_RLN: Tensor, documents_RL: Tensor) -> Tensor:
    """Return running sums over each document's tokens, with a loop over documents.

    Differences between running sums over the full row would need no loop. But their rounding in one document would
    depend on the documents before it.
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

    This function is for GPUs. `document_sums` loops over documents, so on a GPU the host would have to wait for the
    document count. The two functions add in different orders.
    """
    reach = 1
    while reach < x_RLN.shape[1]:
        same_RL1 = (documents_RL[:, reach:] == documents_RL[:, :-reach])[..., None]
        added_RLN = x_RLN[:, reach:] + torch.where(same_RL1, x_RLN[:, :-reach], 0.0)
        x_RLN = torch.cat((x_RLN[:, :reach], added_RLN), dim=1)
        reach *= 2
    return x_RLN


def candidates(seed: int, rows: int, length: int, most: int, device: torch.device) -> Tensor:
    """Return the positions (R, C) of at most `most` different tokens drawn from each row; they depend on the seed."""
    numbers_RL = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed >> 1), dtype=torch.float64)
    return numbers_RL.topk(min(most, length), dim=-1).indices.to(device, non_blocking=True)


@torch.no_grad()
def worth_of_keys(
    q_RLN: Tensor, documents_RL: Tensor, first: int, k_RCN: Tensor, documents_RC: Tensor, chosen_RC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each candidate's summed sigmoids, and the number of summed queries, both (R, C).

    A query is summed if it is in the candidate's document, and at or after the candidate. `chosen_RC` holds the
    candidates' positions in the row. `first` is the first query's position.
    """
    places_L = torch.arange(first, first + q_RLN.shape[1], device=q_RLN.device)
    asks_RLC = (places_L[:, None] >= chosen_RC[:, None]) & (documents_RL[..., None] == documents_RC[:, None])
    worth_RLC = torch.sigmoid(at_least_fp32(q_RLN) @ at_least_fp32(k_RCN).mT) * asks_RLC
    return worth_RLC.sum(1), asks_RLC.sum(1)


def ranking_loss(scores_RC: Tensor, worth_RC: Tensor, documents_RC: Tensor) -> Tensor:
    """Return the loss, averaged first over each row's pairs of candidates in one document, then over rows."""
    logits_RCC = scores_RC[:, :, None] - scores_RC[:, None]
    larger_RCC = torch.sign(worth_RC[:, :, None] - worth_RC[:, None])
    losses_RCC = F.binary_cross_entropy_with_logits(logits_RCC, (larger_RCC + 1) / 2, reduction="none")
    same_RCC = documents_RC[:, :, None] == documents_RC[:, None]
    return ((losses_RCC * same_RCC).sum((1, 2)) / same_RCC.sum((1, 2))).mean()
