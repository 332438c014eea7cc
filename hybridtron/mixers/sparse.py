"""Sparse attention added to a recurrence (`architecture/sparse.py`).

The branch first decides which keys each query sees (`Seen`), then attends to them.

Legend: B rows (sequences), G groups of channels, R pairs (row, group), L new tokens, M remembered keys, N channels per
query or key, P value channels per group, C candidate keys in the ranking loss, h columns of the hash's random matrix.
R = B * G, S = M + L, E = G * P. In kq_BLC and entries_RMC, C stands for several concatenated sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.sparse import SparseOptions
from hybridtron.data.batch import SeqInfo, SequenceShard
from hybridtron.mixers.base import State, apply_with_input_in_layout
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
from hybridtron.parallel.context import all_reduce_shards, earlier_shards, incoming_state
from hybridtron.parallel.linear import TensorGroup, all_reduce_gradients

Hash = Callable[[Tensor, Tensor], Tensor | None]


class SparseBranch(nn.Module):
    """Sparse attention added to a recurrence's output, before the output gate.

    To the ops, each pair (row, group) is a row. State:

        sparse_keys       (B, M, G, N)
        sparse_values     (B, M, E)
        sparse_places     (B, M, G), the keys' positions in the document, counted from 1; 0 for an unused slot
        sparse_length     (B,), how many tokens the document has so far
        sparse_scores     (B, M, G), the keys' scores; only with a pattern that scores keys
        sparse_queries    (B, G, N), sum of the document's queries so far; only with a pattern that scores keys
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
        """Return the attention's output times `gate` (B, L, E), the state to carry, and the auxiliary losses by name.

        The only auxiliary loss is the ranking loss; it exists only in training, with a pattern that scores keys.
        `before` is the carried state.
        """
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
        """Return a function that maps vectors and their document indices to hash bins.

        If the pattern has no hash, the function returns None. In training, every micro-batch draws a new hash.
        """
        if not self.options.hashed:
            return lambda x_RSN, documents_RS: None
        matrix_Nh = hash_matrix(seq.number(f"hash/{self.layer}"), self.size, self.options.columns, device)
        rule = self.options.bins
        centre = self.options.centre
        return lambda x_RSN, documents_RS: hash_bins(x_RSN, documents_RS, matrix_Nh, rule, centre)

    def _memory(self, before: State, own: SparseKeys, hashed: Hash, groups: int, seq: SeqInfo) -> SparseMemory | None:
        """Return the remembered keys of the document that a row's first token continues.

        With context parallelism, these are the carried keys and the keys that all earlier sequence shards (the parts of
        the row on other ranks) remember.
        """
        memory = _carried(before, groups)
        shard = seq.shard
        if shard is None:
            return memory
        behind_R, reaches_R = (x_B.repeat_interleave(groups) for x_B in (shard.behind_B, shard.reaches_B))
        if memory is None:
            length_R = behind_R
        else:
            length_R = behind_R + torch.where(reaches_R, memory.length_R, 0)
        nothing = SparseMemory(own.keys_RSN[:, :0], own.values_RSP[:, :0], own.places_RS[:, :0], length_R)
        if own.scores_RS is not None:
            nothing = nothing._replace(scores_RM=own.scores_RS[:, :0])
        bins_RL = hashed(own.keys_RSN, own.documents_RS)
        slots = min(self.options.slots, shard.length)
        remembered = remember(self.budget, joined(nothing, own), bins_RL, slots)
        if memory is None:
            carried = []
        else:
            carried = [_where(reaches_R, memory)]
        return merged([*carried, *_earlier(remembered, behind_R, shard)], length_R)

    def _scores(
        self, q_RLN: Tensor, k_RLN: Tensor, documents_RL: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, Tensor]:
        """Return each key's score in fp32, and the sum of the queries so far in the row's last document.

        No gradient flows to queries and keys.
        """
        sums_BGN = before.get("sparse_queries")
        batch = len(seq.positions_BL)
        zeros_RN = q_RLN.new_zeros(len(q_RLN), self.size)
        if seq.shard is not None:
            _, added_RN = query_directions(q_RLN, documents_RL, zeros_RN)
            sums_BGN = incoming_state(added_RN.unflatten(0, (batch, -1)), None, sums_BGN, seq.shard)
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
        """Return the ranking loss, a mean over this rank's groups.

        The loss's gradient is divided by the number of tensor-parallel ranks. The ranks then sum their gradients of the
        scoring weights, which gives the mean over ranks.
        """
        (batch, length) = seq.positions_BL.shape
        shard = seq.shard
        if shard is None:
            first = 0
            whole = length
        else:
            first = shard.first
            whole = shard.size * length
        seed = seq.number(f"candidates/{self.layer}")
        chosen_BC = candidates(seed, batch, whole, self.budget.best, q_RLN.device)
        chosen_RC = chosen_BC.repeat_interleave(len(q_RLN) // batch, dim=0)
        keys_RCN, documents_RC, x_RC = (
            _of_row(x, chosen_RC, shard) for x in (own.keys_RSN.detach(), own.documents_RS, scores_RL)
        )
        sums_RC, asks_RC = (
            x if shard is None else all_reduce_shards(x, shard)
            for x in worth_of_keys(q_RLN, own.documents_RS, first, keys_RCN, documents_RC, chosen_RC)
        )
        if self.options.target == "sum":
            worth_RC = sums_RC
        else:
            worth_RC = sums_RC / asks_RC
        loss = self.options.alpha * ranking_loss(x_RC, worth_RC, documents_RC)
        return loss / self.ranks + (loss - loss / self.ranks).detach()


def projected_heads(projection: nn.Module, x_BLE: Tensor, tensor: TensorGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and queries (B, L, 1, N), projected from x, and x (B, L, E) for the values. There is one group."""
    v_BLE, kq_BLC = apply_with_input_in_layout(projection, x_BLE)
    k_BLN, q_BLN = all_reduce_gradients(kq_BLC, tensor).chunk(2, dim=-1)
    return k_BLN.unsqueeze(2), q_BLN.unsqueeze(2), v_BLE


def _rows(x_BLGN: Tensor) -> Tensor:
    """Reshape (B, L, G, N) to (B * G, L, N)."""
    return x_BLGN.transpose(1, 2).flatten(0, 1)


def _groups(x_RMN: Tensor, groups: int) -> Tensor:
    """Reshape (B * G, M, ...) to (B, M, G, ...)."""
    return x_RMN.unflatten(0, (-1, groups)).transpose(1, 2)


def _documents(seq: SeqInfo) -> tuple[Tensor, Tensor]:
    """Return each token's document index, and its position in the part of the document that this row holds."""
    index_BL = torch.arange(seq.positions_BL.shape[1], device=seq.positions_BL.device).expand_as(seq.positions_BL)
    starts_BL = document_starts(seq.documents_BL)
    if seq.documents_BL is None or starts_BL is None:
        return torch.zeros_like(index_BL), index_BL
    begin_BL = torch.where(starts_BL, index_BL, 0).cummax(1).values
    return seq.documents_BL.long(), index_BL - begin_BL


def _of_row(x_RL: Tensor, chosen_RC: Tensor, shard: SequenceShard | None) -> Tensor:
    """Return x at the tokens `chosen_RC` in each row, gathered from the ranks that divide the row's tokens."""
    if shard is None:
        places_RC = chosen_RC
    else:
        places_RC = chosen_RC - shard.first
    index = places_RC.clamp(0, x_RL.shape[1] - 1).view(*places_RC.shape, *[1] * (x_RL.dim() - 2))
    gathered_RC = x_RL.gather(1, index.expand(*places_RC.shape, *x_RL.shape[2:]))
    if shard is None:
        return gathered_RC
    in_shard_RC = ((places_RC >= 0) & (places_RC < shard.length)).view(index.shape)
    return all_reduce_shards(torch.where(in_shard_RC, gathered_RC, 0), shard)


def _earlier(kept: SparseMemory, behind_R: Tensor, shard: SequenceShard) -> Iterator[SparseMemory]:
    """Yield the keys that each earlier sequence shard remembers; `kept` are the keys that this rank's shard remembers.

    If an earlier shard's keys do not belong to the document that this rank's shard continues, their slots are marked as
    unused. `behind_R` is the number of this document's tokens in earlier shards.
    """
    size = kept.keys_RMN.shape[2]
    entries_RMC = torch.cat((kept.keys_RMN, kept.values_RMP), dim=2)
    scores = [] if kept.scores_RM is None else [kept.scores_RM]
    parts = zip(*(earlier_shards(x, shard) for x in (entries_RMC, kept.places_RM, *scores)), strict=True)
    for hop, (entries, places_RM, *own_scores) in zip(range(shard.size - 1, 0, -1), parts, strict=True):
        keys = entries[..., :size]
        values = entries[..., size:]
        memory = SparseMemory(keys, values, places_RM, behind_R, *own_scores)
        yield _where(behind_R > (hop - 1) * shard.length, memory)


def _where(own_R: Tensor, memory: SparseMemory) -> SparseMemory:
    """Return the memory with all slots marked as unused in rows where `own_R` is False."""
    return memory._replace(places_RM=torch.where(own_R[:, None], memory.places_RM, 0))


def _carried(before: State, groups: int) -> SparseMemory | None:
    """Return the carried state as a memory, or None if no state is carried."""
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
