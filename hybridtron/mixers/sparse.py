"""Sparse attention beside a recurrence (`architecture/sparse.py`): who sees whom is decided first, then attended."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.sparse import SparseOptions
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import State, beside_as_stored
from hybridtron.ops.documents import document_starts
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.sparse import (
    Budget,
    Seen,
    SparseInputs,
    SparseKeys,
    SparseMemory,
    candidates,
    hash_bins,
    hash_matrix,
    joined,
    query_directions,
    ranking_loss,
    remember,
    sparse_attention,
    worth_of_keys,
)
from hybridtron.parallel.linear import TensorGroup, sum_gradients


class SparseBranch(nn.Module):
    """What a mixer adds beside its recurrence, before the gate of its output.

    Rows of the ops are the groups of the batch's rows. State: `sparse_keys` (B, M, G, N), `sparse_values` (B, M, E),
    `sparse_places` (B, M, G), counted from 1, and `sparse_length` (B,); where keys are scored `sparse_scores`
    (B, M, G), and `sparse_queries` (B, G, N), the sum of all queries.
    """

    def __init__(
        self, options: SparseOptions, size: int, channels: int, sizes: ModelSizes, tensor: TensorGroup
    ) -> None:
        super().__init__()
        self.options, self.budget, self.ranks = options, Budget(**options.budget), tensor.size
        self.layer, self.size = sizes.layer, size
        self.gate = nn.Parameter(torch.empty(channels))
        if options.scored:
            self.weight_1, self.weight_2 = (nn.Parameter(torch.empty(2 * size, 2 * size)) for _ in range(2))
            self.bias_1, self.bias_2 = (nn.Parameter(torch.empty(2 * size)) for _ in range(2))
            self.weight_3 = nn.Parameter(torch.empty(1, 2 * size))

    def forward(
        self, k_BLGN: Tensor, q_BLGN: Tensor, v_BLE: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State, dict[str, Tensor]]:
        """gate * y (B, L, E), what is carried, and the ranking loss in training."""
        batch, groups = len(q_BLGN), q_BLGN.shape[2]
        q_RLN, k_RLN = (_rows(x_BLGN) for x_BLGN in (q_BLGN, k_BLGN * self.size**-0.5))
        documents_RL, places_RL = (x_BL.repeat_interleave(groups, dim=0) for x_BL in _documents(seq))
        own = SparseKeys(k_RLN, _rows(v_BLE.unflatten(-1, (groups, -1))), documents_RL, places_RL)
        new, aux = State(), dict[str, Tensor]()
        if self.options.scored:
            scores_RL, sums_RN = self._scores(q_RLN, k_RLN, documents_RL, before)
            new["sparse_queries"] = sums_RN.unflatten(0, (batch, groups))
            own = own._replace(scores_RS=scores_RL.detach())
            if seq.key is not None:
                aux["ranking"] = self._ranking(q_RLN, own, scores_RL, seq)
        at_hand = joined(_memory(before, groups), own)
        bins_RL, bins_RS = self._bins(q_RLN, documents_RL, at_hand, seq)
        seen = Seen(self.budget, at_hand.documents_RS, at_hand.places_RS, bins_RL, bins_RS, at_hand.scores_RS)
        y_RLP = sparse_attention(SparseInputs(q_RLN, at_hand.keys_RSN, at_hand.values_RSP, seen))
        if seq.carried:
            new |= _state(remember(self.budget, at_hand, bins_RS, self.options.slots), groups)
        y_BLE = y_RLP.unflatten(0, (batch, groups)).transpose(1, 2).flatten(2)
        return (y_BLE * self.gate).to(v_BLE.dtype), new, aux

    def _bins(
        self, q_RLN: Tensor, documents_RL: Tensor, keys: SparseKeys, seq: SeqInfo
    ) -> tuple[Tensor | None, Tensor | None]:
        """Those of queries and keys, if the pattern has any: by a new hash in every step of training."""
        if not self.options.hashed:
            return None, None
        matrix_Nh = hash_matrix(seq.number(f"hash/{self.layer}"), self.size, self.options.columns, q_RLN.device)
        rule, centre = self.options.bins, self.options.centre
        of_queries = hash_bins(q_RLN, documents_RL, matrix_Nh, rule, centre)
        return of_queries, hash_bins(keys.keys_RSN, keys.documents_RS, matrix_Nh, rule, centre)

    def _scores(self, q_RLN: Tensor, k_RLN: Tensor, documents_RL: Tensor, before: State) -> tuple[Tensor, Tensor]:
        """The score of each key in fp32, and the sum of the queries; nothing flows back to queries and keys."""
        sums_BGN = before.get("sparse_queries")
        sums_RN = q_RLN.new_zeros(len(q_RLN), self.size) if sums_BGN is None else sums_BGN.flatten(0, 1)
        directions_RLN, last_RN = query_directions(q_RLN, documents_RL, sums_RN)
        x = torch.cat((at_least_fp32(k_RLN.detach()), directions_RLN), dim=-1)
        for weight, bias in ((self.weight_1, self.bias_1), (self.weight_2, self.bias_2)):
            x = torch.relu(F.linear(x, weight, bias))
        return F.linear(x, self.weight_3).squeeze(-1), last_RN

    def _ranking(self, q_RLN: Tensor, own: SparseKeys, scores_RL: Tensor, seq: SeqInfo) -> Tensor:
        """The mean over a rank's own groups, with a rank's share of its gradient: those of all ranks are summed."""
        batch, length = seq.positions_BL.shape
        seed = seq.number(f"candidates/{self.layer}")
        chosen_BC = candidates(seed, batch, length, self.budget.best, q_RLN.device)
        chosen_RC = chosen_BC.repeat_interleave(len(q_RLN) // batch, dim=0)
        keys_RCN = own.keys_RSN.gather(1, chosen_RC[..., None].expand(-1, -1, self.size))
        worth_RC = worth_of_keys(q_RLN, keys_RCN, own.documents_RS, chosen_RC, self.options.target)
        ranked = ranking_loss(scores_RL.gather(1, chosen_RC), worth_RC, own.documents_RS.gather(1, chosen_RC))
        loss = self.options.alpha * ranked
        return loss / self.ranks + (loss - loss / self.ranks).detach()


def projected_heads(projection: nn.Module, x_BLE: Tensor, tensor: TensorGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and queries by a projection of their own, one group for all channels, (B, L, 1, N) each; and the values."""
    v_BLE, kq_BLC = beside_as_stored(projection, x_BLE)
    k_BLN, q_BLN = sum_gradients(kq_BLC, tensor).chunk(2, dim=-1)
    return k_BLN.unsqueeze(2), q_BLN.unsqueeze(2), v_BLE


def _rows(x_BLGN: Tensor) -> Tensor:
    """Each group of each row as a row of its own, (B G, L, N)."""
    return x_BLGN.transpose(1, 2).flatten(0, 1)


def _groups(x_RMN: Tensor, groups: int) -> Tensor:
    """The opposite, (B, M, G, ...)."""
    return x_RMN.unflatten(0, (-1, groups)).transpose(1, 2)


def _documents(seq: SeqInfo) -> tuple[Tensor, Tensor]:
    """The document of each token, and its place there as far as the row knows."""
    index_BL = torch.arange(seq.positions_BL.shape[1], device=seq.positions_BL.device).expand_as(seq.positions_BL)
    starts_BL = document_starts(seq.documents_BL)
    if seq.documents_BL is None or starts_BL is None:
        return torch.zeros_like(index_BL), index_BL
    begin_BL = torch.where(starts_BL, index_BL, 0).cummax(1).values
    return seq.documents_BL.long(), index_BL - begin_BL


def _memory(before: State, groups: int) -> SparseMemory | None:
    if "sparse_keys" not in before:
        return None
    scores_BMG = before.get("sparse_scores")
    return SparseMemory(
        _rows(before["sparse_keys"]),
        _rows(before["sparse_values"].unflatten(-1, (groups, -1))),
        _rows(before["sparse_places"]),
        before["sparse_length"].repeat_interleave(groups),
        None if scores_BMG is None else _rows(scores_BMG),
    )


def _state(memory: SparseMemory, groups: int) -> State:
    scores = {} if memory.scores_RM is None else {"sparse_scores": _groups(memory.scores_RM, groups)}
    return scores | {
        "sparse_keys": _groups(memory.keys_RMN, groups),
        "sparse_values": _groups(memory.values_RMP, groups).flatten(2),
        "sparse_places": _groups(memory.places_RM, groups),
        "sparse_length": memory.length_R[::groups],
    }
