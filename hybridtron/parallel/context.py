"""Context parallelism: each rank holds a shard of each sequence, and layers exchange the earlier tokens that they read.

A row is a sequence in a micro-batch. It is cut into shards of equal length, and rank r holds shard r. The exchange
depends on the layer:

    recurrences       A shard maps its initial state h to its final state A h + e. A rank receives A and e from earlier
                      shards, computes its own shard's initial state from them, and scans from this state.
    convolutions      A rank gets a halo: the tokens before its shard that the convolution reads.
    attention         A rank gets all earlier keys and values. With an attention window, it gets only the keys and
                      values in the window.
    span attention    A rank gets all earlier keys and values, and a summary for each block of keys in the row. It
                      selects blocks by their summaries.
    sparse attention  A rank gets from every earlier shard the keys that its queries can see (`ops/sparse/memory.py`).

Gradients flow back through the same exchanges. If states are carried from one row to the next, all ranks get the row's
initial states and its final states. A document may cross shard boundaries. A shard receives nothing from documents that
end before the shard begins.

Legend: B rows, L tokens in a shard, T earlier tokens that a layer reads, M tokens whose keys and values are carried
from the previous row, G key-value heads, K channels per head, C any other axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.data.batch import Batch, SeqInfo, SequenceShard
from hybridtron.ops.attention import AttentionMemory
from hybridtron.ops.transition import StateTransition
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.plain_values import all_gather_tensors, broadcast_value


def local_shard(batch: Batch, context: RankGroup) -> Batch:
    """Return this rank's sequence shard of a batch, with the information about documents that layers need.

    The batch may hold full rows, or rows from which this rank has read only its shard (`data/sequence_shard.py`).
    """
    if context.size == 1:
        return batch
    if (row_shard := batch.seq.shard) is not None:
        assert (row_shard.size, row_shard.rank) == (context.size, context.rank)
        return replace(batch, seq=replace(batch.seq, shard=replace(row_shard, group=context.group)))
    tokens = local_tokens(batch.tokens_BL.shape[1], context)
    tokens_BL, labels_BL, mask_BL = (t[:, tokens] for t in (batch.tokens_BL, batch.labels_BL, batch.mask_BL))
    return Batch(tokens_BL, labels_BL, mask_BL, seq_of_shard(batch.seq, context), batch.continues_B)


def local_tokens(length: int, context: RankGroup) -> slice:
    """Return this rank's slice of a row with `length` tokens. The number of ranks must divide the length."""
    shard_length = length // context.size
    return slice(context.rank * shard_length, (context.rank + 1) * shard_length)


def seq_of_shard(seq: SeqInfo, context: RankGroup) -> SeqInfo:
    """Return the `SeqInfo` for this rank's sequence shard, from the `SeqInfo` for full rows."""
    documents_BL = seq.documents_BL
    rows, length = seq.positions_BL.shape
    tokens = local_tokens(length, context)
    device = seq.positions_BL.device
    first = tokens.start
    shard_length = tokens.stop - tokens.start
    # behind_B: the number of tokens before the shard in the same document as the shard's first token
    # unbroken_B: True if all tokens in the shard belong to one document
    if documents_BL is None:
        behind_B = torch.full((rows,), first, device=device)
        unbroken_B = torch.ones(rows, dtype=torch.bool, device=device)
    else:
        shard_BL = documents_BL[:, tokens]
        behind_B = (documents_BL[:, :first] == shard_BL[:, :1]).sum(1)
        unbroken_B = shard_BL[:, 0] == shard_BL[:, -1]
    shard = SequenceShard(context.size, context.rank, context.group, seq.spans(), shard_length, behind_B, unbroken_B)
    return replace(seq.map(lambda t: t[:, tokens].contiguous()), shard=shard).with_boundaries()


Inputs = TypeVar("Inputs", bound=tuple[Any, ...])


def contiguous_inputs(inputs: Inputs, seq: SeqInfo) -> Inputs:
    """Make a recurrence's inputs contiguous under context parallelism, because they are then scanned twice.

    With inputs that are not contiguous, each of the two scans would make and save a copy. Without context parallelism
    the inputs are returned unchanged.
    """
    if seq.shard is None:
        return inputs
    return type(inputs)(*(x.contiguous() if isinstance(x, Tensor) else x for x in inputs))


# Runs a recurrence over a shard: takes the initial state, or None for zeros; returns the outputs and the final state.
Scan = Callable[[Tensor | None], tuple[Tensor, Tensor]]


def sharded_scan(
    scan: Scan, state: Tensor | None, seq: SeqInfo, transition: Callable[[], StateTransition]
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over this rank's sequence shard; return the outputs and the shard's final state.

    The shard maps its initial state h to A h + e. `transition` returns A. The shard is scanned twice: first from zeros,
    which gives e, and then from its true initial state. `state` is the row's initial state, or None for zeros.
    """
    if seq.shard is None:
        return scan(state)
    return scan(incoming_state(scan(None)[1], transition(), state, seq.shard))


def incoming_state(
    added: Tensor, transition: StateTransition | None, state: Tensor | None, shard: SequenceShard
) -> Tensor:
    """Return this rank's initial state.

    The shard of rank r maps its initial state h to A_r h + e_r. `added` is e_r, the final state of a scan from zeros.
    `transition` is A_r, where None means the identity. `state` is the row's initial state, or None for zeros.

    First, rank r receives A and e from rank r - 1. Then a prefix scan combines the shards 0 to r - 1: in the rounds
    with hop = 1, 2, 4, ... rank r combines its own and rank (r - hop)'s intermediate results.
    """
    wide = (-1, *[1] * (added.dim() - 1))
    enters = shard.enters_B.view(wide)
    # enters: True for rows in which the shard's first token continues a document, so that an earlier state applies
    # passes: True for rows without a document boundary at the shard's start or inside, so that a state passes through
    passes = (shard.enters_B & shard.unbroken_B).view(wide)
    if transition is None:
        transition = StateTransition(torch.ones_like(added))
    # every rank receives A and e of the shard before its own: its initial state must not include its own shard
    values = _shifted(torch.where(passes, transition.values, 0), shard, 1)
    added = _shifted(added, shard, 1)
    if transition.is_matrix:
        identity = values.new_ones(values.shape[-1]).diag()
    else:
        identity = values.new_ones(())
    # rank 0 has received zeros, as it has no previous shard: its A becomes the identity
    through = transition._replace(values=values if shard.rank else values + identity)
    hop = 1
    while hop < shard.size - 1:
        earlier = _shifted(through.values, shard, hop)
        earlier_added = _shifted(added, shard, hop)
        if not (shard.rank >= hop):  # no rank is `hop` places before this rank, so it received zeros
            earlier = earlier + identity
        added = added + through.apply(earlier_added)
        through = through._replace(values=through.apply(earlier))
        hop *= 2
    if state is not None:
        added = added + through.apply(state.to(added.dtype))
    return torch.where(enters, added, 0)


def halo_tokens(x_BLC: Tensor, count: int, carried_BTC: Tensor | None, seq: SeqInfo) -> Tensor | None:
    """Return the activations for the `count` tokens before this shard, as a halo for a convolution.

    Before the row's first token, the halo has the activations that are carried from the previous row, or else zeros. It
    also has zeros for tokens of another document than the shard's first token. Without context parallelism the carried
    activations are returned unchanged.
    """
    shard = seq.shard
    if shard is None:
        return carried_BTC
    halo_BTC = _halo(x_BLC, count, shard)
    real = min(count, shard.first)
    if carried_BTC is not None and real < count:
        halo_BTC = torch.cat((carried_BTC[:, real - count :].to(halo_BTC.dtype), halo_BTC[:, count - real :]), 1)
    back_T = torch.arange(count, 0, -1, device=x_BLC.device)
    visible_BT = (back_T <= shard.behind_B[:, None]) | shard.reaches_B[:, None]
    return torch.where(visible_BT.view(*visible_BT.shape, *[1] * (x_BLC.dim() - 2)), halo_BTC, 0)


def halo_parts(
    parts_BLC: Sequence[Tensor], count: int, carried_BTC: Tensor | None, seq: SeqInfo
) -> Sequence[Tensor | None]:
    """Return the halo of each part (see `halo_tokens`). `carried_BTC` has the channels of all parts.

    One exchange between ranks serves all parts.
    """
    if seq.shard is None:
        halo_BTC = carried_BTC
    else:
        # the later tokens alone, since the halo of the next shard needs no others
        last = slice(max(0, seq.shard.length - count), None)
        halo_BTC = halo_tokens(torch.cat([part_BLC[:, last] for part_BLC in parts_BLC], -1), count, carried_BTC, seq)
    if halo_BTC is None:
        return [None] * len(parts_BLC)
    return halo_BTC.split([part_BLC.shape[-1] for part_BLC in parts_BLC], -1)


def halo_kv(
    k_BLGK: Tensor, v_BLGK: Tensor, window: int | None, carried: AttentionMemory | None, seq: SeqInfo
) -> AttentionMemory | None:
    """Return the keys and values before this shard that the shard's queries can see.

    These are the keys and values in the attention window, or all earlier keys and values if `window` is None. Keys and
    values carried from the previous row come first.
    """
    shard = seq.shard
    if shard is None:
        return carried
    if window is None:
        count = shard.length * (shard.size - 1)
    else:
        count = window - 1
    real = min(count, shard.first)
    # one exchange for keys and values together
    halo_BTGK = _halo(torch.cat((k_BLGK, v_BLGK), -1), count, shard)[:, count - real :]
    keys, values = halo_BTGK.split((k_BLGK.shape[-1], v_BLGK.shape[-1]), -1)
    length_B = shard.behind_B
    if carried is not None:
        if window is None:
            max_carried = carried.keys_BMGK.shape[1]
        else:
            max_carried = count - real
        older = slice(max(0, carried.keys_BMGK.shape[1] - max_carried), None)
        keys = torch.cat((carried.keys_BMGK[:, older], keys), 1)
        values = torch.cat((carried.values_BMGK[:, older], values), 1)
        length_B = length_B + torch.where(shard.reaches_B, carried.length_B, 0)
    return AttentionMemory(keys, values, length_B.clamp(max=keys.shape[1]))


def earlier_shards(x: Tensor, shard: SequenceShard) -> Iterator[Tensor]:
    """Yield each earlier shard's tensor x, in order.

    For N shards every rank gets N - 1 tensors, since all ranks must take part in all exchanges. Rank r has only r
    earlier shards, so all tensors but the last r are zeros.
    """
    for hop in range(shard.size - 1, 0, -1):
        yield _shifted(x, shard, hop)


def all_reduce_shards(x: Tensor, shard: SequenceShard) -> Tensor:
    """All-reduce x over the ranks that hold a row's shards; the gradient is all-reduced too."""
    return _AllReduceShards.apply(x, shard)  # type: ignore[return-value]


def broadcast_from_last(x: Tensor, context: RankGroup) -> Tensor:
    """Return the last shard's tensor on every rank, without a gradient."""
    if context.size == 1:
        return x
    x = x.detach().clone(memory_format=torch.contiguous_format)
    fill_from_last_shard(x, context)
    return x


def fill_from_last_shard(x: Tensor, context: RankGroup) -> None:
    """Broadcast the last shard's tensor into x, in place."""
    dist.broadcast(x, dist.get_global_rank(_group(context), context.size - 1), group=context.group)


def value_from_last_shard(value: Any, context: RankGroup) -> Any:
    """Return the last shard's plain value on every rank."""
    return broadcast_value(value, dist.get_global_rank(_group(context), context.size - 1), context.group)


def all_gather_shards(x_LB: Tensor, context: RankGroup) -> Tensor:
    """All-gather per-token values, and return them concatenated along the token axis, without a gradient."""
    parts = [torch.empty_like(x_LB, memory_format=torch.contiguous_format) for _ in range(context.size)]
    dist.all_gather(parts, x_LB.detach().contiguous(), group=_group(context))
    return torch.cat(parts)


def tensors_of_all_shards(tensors: Mapping[str, Tensor], context: RankGroup) -> list[dict[str, Tensor]]:
    """All-gather every rank's named tensors to the CPU, one dictionary per shard in order, without gradients."""
    if context.size == 1:
        return [{name: tensor.detach().cpu() for name, tensor in tensors.items()}]
    return all_gather_tensors(tensors, _group(context))


def _group(context: RankGroup) -> dist.ProcessGroup:
    assert context.group is not None
    return context.group


def _halo(x_BLC: Tensor, count: int, shard: SequenceShard) -> Tensor:
    """Return x for the `count` tokens before this shard, received from earlier shards; zeros before the row."""
    hops = math.ceil(count / shard.length)
    parts = []
    for hop in range(hops, 0, -1):
        tokens = min(shard.length, count - (hop - 1) * shard.length)
        parts.append(_shifted(x_BLC[:, x_BLC.shape[1] - tokens :], shard, hop))
    if len(parts) > 1:
        return torch.cat(parts, 1)
    return parts[0]


def _shifted(x: Tensor, shard: SequenceShard, hop: int) -> Tensor:
    """Return the tensor x of the rank that is `hop` places before this rank, or zeros if there is no such rank.

    In backward the gradient is sent to that rank.
    """
    return _Shifted.apply(x, shard, hop)  # type: ignore[return-value]


class _Shifted(torch.autograd.Function):
    """Sends x to the rank that is `hop` places after this rank; backward sends the gradient the opposite way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, hop: int) -> Tensor:
        ctx.shard = shard
        ctx.hop = hop
        return _exchanged(x, shard, hop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.shard, -ctx.hop), None, None


class _AllReduceShards(torch.autograd.Function):
    """All-reduce over a row's shards, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return _summed(x, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.shard), None


def _summed(x: Tensor, shard: SequenceShard) -> Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=shard.group)
    return x


def _exchanged(x: Tensor, shard: SequenceShard, hop: int) -> Tensor:
    """Send x to the rank `hop` places after this rank; return the tensor from the rank `hop` places before it."""
    x, received = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    calls = []
    for send, tensor, peer in ((dist.isend, x, shard.rank + hop), (dist.irecv, received, shard.rank - hop)):
        if 0 <= peer < shard.size:
            calls.append(dist.P2POp(send, tensor, dist.get_global_rank(shard.group, peer), shard.group))
    for call in dist.batch_isend_irecv(calls) if calls else ():
        call.wait()
    return received
