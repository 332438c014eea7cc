"""Branch of sparse attention parallel to a recurrence (`architecture/sparse.py`).

It first decides which keys each query sees (`Seen`), then attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.sparse import SparseOptions
from hybridtron.data.batch import RowShare, SeqInfo
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
    merged,
    query_directions,
    ranking_loss,
    remember,
    sparse_attention,
    worth_of_keys,
)
from hybridtron.parallel.context import earlier_shares, state_before, sum_over_shares
from hybridtron.parallel.linear import TensorGroup, sum_gradients

Hash = Callable[[Tensor, Tensor], Tensor | None]


class SparseBranch(nn.Module):
    """Sparse attention added to a recurrence's output, before that output's gate.

    The ops treat each group of each row as a row (R = B G). State: `sparse_keys` (B, M, G, N), `sparse_values` (B, M,
    E), `sparse_places` (B, M, G), counted from 1, and `sparse_length` (B,); if keys are scored also `sparse_scores` (B,
    M, G) and `sparse_queries` (B, G, N), the sum of all queries.
    """

    def __init__(
        self, options: SparseOptions, size: int, channels: int, sizes: ModelSizes, tensor: TensorGroup
    ) -> None:
        super().__init__()
        self.options, self.budget, self.ranks = options, Budget(**options.budget), tensor.size
        self.layer = sizes.layer
        self.size = size
        self.gate = nn.Parameter(torch.empty(channels))
        if options.scored:
            self.weight_1, self.weight_2 = (nn.Parameter(torch.empty(2 * size, 2 * size)) for _ in range(2))
            self.bias_1, self.bias_2 = (nn.Parameter(torch.empty(2 * size)) for _ in range(2))
            self.weight_3 = nn.Parameter(torch.empty(1, 2 * size))

    def forward(
        self, k_BLGN: Tensor, q_BLGN: Tensor, v_BLE: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State, dict[str, Tensor]]:
        """Return gate * y (B, L, E), the state to carry, and in training the ranking loss."""
        batch = len(q_BLGN)
        groups = q_BLGN.shape[2]
        q_RLN, k_RLN = (_rows(x_BLGN) for x_BLGN in (q_BLGN, k_BLGN * self.size**-0.5))
        documents_RL, places_RL = (x_BL.repeat_interleave(groups, dim=0) for x_BL in _documents(seq))
        keys = SparseKeys(k_RLN, _rows(v_BLE.unflatten(-1, (groups, -1))), documents_RL, places_RL)
        new = State()
        aux = dict[str, Tensor]()
        if self.options.scored:
            scores_RL, sums_RN = self._scores(q_RLN, k_RLN, documents_RL, before, seq)
            new["sparse_queries"] = sums_RN.unflatten(0, (batch, groups))
            keys = keys._replace(scores_RS=scores_RL.detach())
            if seq.key is not None:
                aux["ranking"] = self._ranking(q_RLN, keys, scores_RL, seq)
        hashed = self._hash(q_RLN.device, seq)
        at_hand = joined(self._memory(before, keys, hashed, groups, seq), keys)
        bins_RL, bins_RS = (
            hashed(x, of) for x, of in ((q_RLN, documents_RL), (at_hand.keys_RSN, at_hand.documents_RS))
        )
        visible = Seen(self.budget, at_hand.documents_RS, at_hand.places_RS, bins_RL, bins_RS, at_hand.scores_RS)
        y_RLP = sparse_attention(SparseInputs(q_RLN, at_hand.keys_RSN, at_hand.values_RSP, visible))
        if seq.carried:
            new |= _state(remember(self.budget, at_hand, bins_RS, self.options.slots), groups)
        y_BLE = y_RLP.unflatten(0, (batch, groups)).transpose(1, 2).flatten(2)
        return (y_BLE * self.gate).to(v_BLE.dtype), new, aux

    def _hash(self, device: torch.device, seq: SeqInfo) -> Hash:
        """Return a function that hashes vectors to bins, by document; it returns None if no keys are binned.

        Every training step draws a new hash.
        """
        if not self.options.hashed:
            return lambda x_RSN, documents_RS: None
        matrix_Nh = hash_matrix(seq.number(f"hash/{self.layer}"), self.size, self.options.columns, device)
        rule = self.options.bins
        centre = self.options.centre
        return lambda x_RSN, documents_RS: hash_bins(x_RSN, documents_RS, matrix_Nh, rule, centre)

    def _memory(self, before: State, own: SparseKeys, hashed: Hash, groups: int, seq: SeqInfo) -> SparseMemory | None:
        """Return the keys remembered from the document that the first token continues.

        With context parallelism these are the carried ones and those from all earlier sequence shards.
        """
        memory = _carried(before, groups)
        share = seq.share
        if share is None:
            return memory
        behind_R, reaches_R = (x_B.repeat_interleave(groups) for x_B in (share.behind_B, share.reaches_B))
        if memory is None:
            length_R = behind_R
        else:
            length_R = behind_R + torch.where(reaches_R, memory.length_R, 0)
        nothing = SparseMemory(own.keys_RSN[:, :0], own.values_RSP[:, :0], own.places_RS[:, :0], length_R)
        if own.scores_RS is not None:
            nothing = nothing._replace(scores_RM=own.scores_RS[:, :0])
        bins_RL = hashed(own.keys_RSN, own.documents_RS)
        slots = min(self.options.slots, share.length)
        remembered = remember(self.budget, joined(nothing, own), bins_RL, slots)
        if memory is None:
            carried = []
        else:
            carried = [_where(reaches_R, memory)]
        return merged([*carried, *_earlier(remembered, behind_R, share)], length_R)

    def _scores(
        self, q_RLN: Tensor, k_RLN: Tensor, documents_RL: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, Tensor]:
        """Return each key's score in fp32, and the queries' sum. No gradient flows to queries and keys."""
        sums_BGN = before.get("sparse_queries")
        batch = len(seq.positions_BL)
        zeros_RN = q_RLN.new_zeros(len(q_RLN), self.size)
        if seq.share is not None:
            _, added_RN = query_directions(q_RLN, documents_RL, zeros_RN)
            sums_BGN = state_before(added_RN.unflatten(0, (batch, -1)), None, sums_BGN, seq.share)
        if sums_BGN is None:
            sums_RN = zeros_RN
        else:
            sums_RN = sums_BGN.flatten(0, 1)
        directions_RLN, last_RN = query_directions(q_RLN, documents_RL, sums_RN)
        x = torch.cat((at_least_fp32(k_RLN.detach()), directions_RLN), dim=-1)
        for weight, bias in ((self.weight_1, self.bias_1), (self.weight_2, self.bias_2)):
            x = torch.relu(F.linear(x, weight, bias))
        return F.linear(x, self.weight_3).squeeze(-1), last_RN

    def _ranking(self, q_RLN: Tensor, own: SparseKeys, scores_RL: Tensor, seq: SeqInfo) -> Tensor:
        """Return the ranking loss, the mean over this rank's groups, with its gradient divided by the number of ranks.

        Tensor-parallel ranks sum the scoring weights' gradients, which makes the total a mean over ranks.
        """
        (batch, length) = seq.positions_BL.shape
        share = seq.share
        if share is None:
            first = 0
            whole = length
        else:
            first = share.first
            whole = share.size * length
        seed = seq.number(f"candidates/{self.layer}")
        chosen_BC = candidates(seed, batch, whole, self.budget.best, q_RLN.device)
        chosen_RC = chosen_BC.repeat_interleave(len(q_RLN) // batch, dim=0)
        keys_RCN, documents_RC, x_RC = (
            _of_row(x, chosen_RC, share) for x in (own.keys_RSN.detach(), own.documents_RS, scores_RL)
        )
        sums_RC, asks_RC = (
            x if share is None else sum_over_shares(x, share)
            for x in worth_of_keys(q_RLN, own.documents_RS, first, keys_RCN, documents_RC, chosen_RC)
        )
        if self.options.target == "sum":
            worth_RC = sums_RC
        else:
            worth_RC = sums_RC / asks_RC
        loss = self.options.alpha * ranking_loss(x_RC, worth_RC, documents_RC)
        return loss / self.ranks + (loss - loss / self.ranks).detach()


def projected_heads(projection: nn.Module, x_BLE: Tensor, tensor: TensorGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Project to keys and queries (B, L, 1, N), one group for all channels; return keys, queries and the values."""
    v_BLE, kq_BLC = beside_as_stored(projection, x_BLE)
    k_BLN, q_BLN = sum_gradients(kq_BLC, tensor).chunk(2, dim=-1)
    return k_BLN.unsqueeze(2), q_BLN.unsqueeze(2), v_BLE


def _rows(x_BLGN: Tensor) -> Tensor:
    """Reshape (B, L, G, N) to one row per group, (B G, L, N)."""
    return x_BLGN.transpose(1, 2).flatten(0, 1)


def _groups(x_RMN: Tensor, groups: int) -> Tensor:
    """Reshape rows (B G, M, ...) back to groups, (B, M, G, ...)."""
    return x_RMN.unflatten(0, (-1, groups)).transpose(1, 2)


def _documents(seq: SeqInfo) -> tuple[Tensor, Tensor]:
    """Return each token's document index, and its position in the part of the document that this row holds."""
    index_BL = torch.arange(seq.positions_BL.shape[1], device=seq.positions_BL.device).expand_as(seq.positions_BL)
    starts_BL = document_starts(seq.documents_BL)
    if seq.documents_BL is None or starts_BL is None:
        return torch.zeros_like(index_BL), index_BL
    begin_BL = torch.where(starts_BL, index_BL, 0).cummax(1).values
    return seq.documents_BL.long(), index_BL - begin_BL


def _of_row(x_RL: Tensor, chosen_RC: Tensor, share: RowShare | None) -> Tensor:
    """Gather the values at these tokens of each row, across the ranks that divide the row."""
    if share is None:
        places_RC = chosen_RC
    else:
        places_RC = chosen_RC - share.first
    index = places_RC.clamp(0, x_RL.shape[1] - 1).view(*places_RC.shape, *[1] * (x_RL.dim() - 2))
    gathered_RC = x_RL.gather(1, index.expand(*places_RC.shape, *x_RL.shape[2:]))
    if share is None:
        return gathered_RC
    in_shard_RC = ((places_RC >= 0) & (places_RC < share.length)).view(index.shape)
    return sum_over_shares(torch.where(in_shard_RC, gathered_RC, 0), share)


def _earlier(kept: SparseMemory, behind_R: Tensor, share: RowShare) -> Iterator[SparseMemory]:
    """Yield the keys that each earlier sequence shard remembers of the document continuing into this one."""
    size = kept.keys_RMN.shape[2]
    entries_RMC = torch.cat((kept.keys_RMN, kept.values_RMP), dim=2)
    scores = [] if kept.scores_RM is None else [kept.scores_RM]
    parts = zip(*(earlier_shares(x, share) for x in (entries_RMC, kept.places_RM, *scores)), strict=True)
    for hop, (entries, places_RM, *own_scores) in zip(range(share.size - 1, 0, -1), parts, strict=True):
        keys = entries[..., :size]
        values = entries[..., size:]
        memory = SparseMemory(keys, values, places_RM, behind_R, *own_scores)
        yield _where(behind_R > (hop - 1) * share.length, memory)


def _where(own_R: Tensor, memory: SparseMemory) -> SparseMemory:
    """Keep the memory in the selected rows and empty all slots of the others."""
    return memory._replace(places_RM=torch.where(own_R[:, None], memory.places_RM, 0))


def _carried(before: State, groups: int) -> SparseMemory | None:
    """Return the carried state as a memory; None at the start of a document."""
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
    """Return a memory as state parts."""
    if memory.scores_RM is None:
        scores = {}
    else:
        scores = {"sparse_scores": _groups(memory.scores_RM, groups)}
    return scores | {
        "sparse_keys": _groups(memory.keys_RMN, groups),
        "sparse_values": _groups(memory.values_RMP, groups).flatten(2),
        "sparse_places": _groups(memory.places_RM, groups),
        "sparse_length": memory.length_R[::groups],
    }
