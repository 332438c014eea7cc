"""Context parallelism: each rank holds a sequence shard, in order, and layers exchange the earlier tokens they read.

    recurrences     are affine in their state: a shard maps h to T h + e. From T and e of all earlier shards a rank
                    computes the state at the start of its own shard, and scans from there
    convolutions    a halo: the last tokens of the previous shard, or of several if the window is longer than a shard
    attention       keys and values likewise: those in the window, or all of them
    spans           all earlier keys and values, and every shard's block summaries, from which blocks are selected
    sparse          from every earlier shard the keys that later queries can still see (`ops/sparse/memory.py`)

Gradients flow back through the same exchange. All ranks of a group have the row's initial and final states. Document
boundaries are those of the full row: nothing reaches a shard that begins with another document.

Legend: B rows, L tokens of a shard, T earlier tokens that a layer reads, C any other axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.data.batch import Batch, RowShare, SeqInfo
from hybridtron.ops.attention import AttentionMemory
from hybridtron.ops.transition import StateTransition
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.plain_values import all_gather_tensors, broadcast_value


@dataclass(frozen=True)
class ContextGroup(RankGroup):
    """Ranks that divide the tokens of every row among them, and this rank's index."""

    group: dist.ProcessGroup | None = None


WHOLE_ROWS = ContextGroup()


def own_share(batch: Batch, context: ContextGroup) -> Batch:
    """Return this rank's sequence shard of a batch, with the boundaries that its layers need.

    The batch may hold full rows, or rows that were already cut when they were read (`data/row_parts.py`).
    """
    if context.size == 1:
        return batch
    if (row_share := batch.seq.share) is not None:
        assert (row_share.size, row_share.rank) == (context.size, context.rank)
        return replace(batch, seq=replace(batch.seq, share=replace(row_share, group=context.group)))
    shard = own_tokens(batch.tokens_BL.shape[1], context)
    tokens_BL, labels_BL, mask_BL = (t[:, shard] for t in (batch.tokens_BL, batch.labels_BL, batch.mask_BL))
    return Batch(tokens_BL, labels_BL, mask_BL, seq_of_share(batch.seq, context), batch.continues_B)


def own_tokens(length: int, context: ContextGroup) -> slice:
    """Return the slice of a row's tokens that this rank holds. The number of ranks divides the length."""
    share_length = length // context.size
    return slice(context.rank * share_length, (context.rank + 1) * share_length)


def seq_of_share(seq: SeqInfo, context: ContextGroup) -> SeqInfo:
    """Return the `SeqInfo` for this rank's sequence shard, cut from the full rows' one."""
    documents_BL = seq.documents_BL
    rows, length = seq.positions_BL.shape
    shard = own_tokens(length, context)
    device = seq.positions_BL.device
    first = shard.start
    share_length = shard.stop - shard.start
    if documents_BL is None:
        behind_B = torch.full((rows,), first, device=device)
        unbroken_B = torch.ones(rows, dtype=torch.bool, device=device)
    else:
        shard_BL = documents_BL[:, shard]
        behind_B = (documents_BL[:, :first] == shard_BL[:, :1]).sum(1)
        unbroken_B = shard_BL[:, 0] == shard_BL[:, -1]
    share = RowShare(context.size, context.rank, context.group, seq.spans(), share_length, behind_B, unbroken_B)
    return replace(seq.map(lambda t: t[:, shard].contiguous()), share=share).with_boundaries()


Inputs = TypeVar("Inputs", bound=tuple[Any, ...])


def read_twice(inputs: Inputs, seq: SeqInfo) -> Inputs:
    """Make a recurrence's inputs contiguous once, because context parallelism scans them twice.

    Otherwise each of the two scans would make and keep its own copy.
    """
    if seq.share is None:
        return inputs
    return type(inputs)(*(x.contiguous() if isinstance(x, Tensor) else x for x in inputs))


Scan = Callable[[Tensor | None], tuple[Tensor, Tensor]]


def scan_from(
    scan: Scan, state: Tensor | None, seq: SeqInfo, transition: Callable[[], StateTransition]
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over this rank's sequence shard; return the outputs and the state after it.

    `scan` runs the recurrence from a given state, or from zeros for None. `transition` returns the shard's
    state transition. A shard is scanned twice: from zeros to get its contribution e, then from its true initial state.
    """
    if seq.share is None:
        return scan(state)
    return scan(state_before(scan(None)[1], transition(), state, seq.share))


def state_before(added: Tensor, transition: StateTransition | None, state: Tensor | None, share: RowShare) -> Tensor:
    """Return the state at the start of this shard, from every shard's final state e_r and its transition T_r.

    A prefix scan by doubling combines shards 0 to r - 1: in each round a rank receives the result of the rank 1, 2, 4,
    ... before it. `added` is e_r, the state that the shard's scan from zeros ends in. `transition` is T_r; None means
    the identity.
    """
    wide = (-1, *[1] * (added.dim() - 1))
    enters = share.enters_B.view(wide)
    passes = (share.enters_B & share.unbroken_B).view(wide)
    if transition is None:
        transition = StateTransition(torch.ones_like(added))
    values = _shifted(torch.where(passes, transition.values, 0), share, 1)
    added = _shifted(added, share, 1)
    if transition.is_matrix:
        identity = values.new_ones(values.shape[-1]).diag()
    else:
        identity = values.new_ones(())
    # rank 0 received zeros: no shard precedes it, so that its T is the identity
    through = transition._replace(values=values if share.rank else values + identity)
    hop = 1
    while hop < share.size - 1:
        earlier = _shifted(through.values, share, hop)
        earlier_added = _shifted(added, share, hop)
        if not (share.rank >= hop):
            earlier = earlier + identity
        added = added + through.apply(earlier_added)
        through = through._replace(values=through.apply(earlier))
        hop *= 2
    if state is not None:
        added = added + through.apply(state.to(added.dtype))
    return torch.where(enters, added, 0)


def tokens_before(x_BLC: Tensor, count: int, carried_BTC: Tensor | None, seq: SeqInfo) -> Tensor | None:
    """Return the `count` tokens before this shard, as a halo for a convolution.

    Tokens of another document than the shard's first are zeros, and so are those before the row. The first shard uses
    the tokens carried from the previous row. With one rank the carried tokens are returned as they are.
    """
    share = seq.share
    if share is None:
        return carried_BTC
    halo_BTC = _halo(x_BLC, count, share)
    real = min(count, share.first)
    if carried_BTC is not None and real < count:
        halo_BTC = torch.cat((carried_BTC[:, real - count :].to(halo_BTC.dtype), halo_BTC[:, count - real :]), 1)
    back_T = torch.arange(count, 0, -1, device=x_BLC.device)
    visible_BT = (back_T <= share.behind_B[:, None]) | share.reaches_B[:, None]
    return torch.where(visible_BT.view(*visible_BT.shape, *[1] * (x_BLC.dim() - 2)), halo_BTC, 0)


def memory_before(
    k_BLGK: Tensor, v_BLGK: Tensor, window: int | None, carried: AttentionMemory | None, seq: SeqInfo
) -> AttentionMemory | None:
    """Return the keys and values before this shard that its window can see, or all of the row if `window` is None.

    Those carried from the previous row come first.
    """
    share = seq.share
    if share is None:
        return carried
    if window is None:
        count = share.length * (share.size - 1)
    else:
        count = window - 1
    real = min(count, share.first)
    halo_BTGK = _halo(torch.cat((k_BLGK, v_BLGK), -1), count, share)[:, count - real :]
    keys, values = halo_BTGK.split((k_BLGK.shape[-1], v_BLGK.shape[-1]), -1)
    length_B = share.behind_B
    if carried is not None:
        if window is None:
            max_carried = carried.keys_BMGK.shape[1]
        else:
            max_carried = count - real
        older = slice(max(0, carried.keys_BMGK.shape[1] - max_carried), None)
        keys = torch.cat((carried.keys_BMGK[:, older], keys), 1)
        values = torch.cat((carried.values_BMGK[:, older], values), 1)
        length_B = length_B + torch.where(share.reaches_B, carried.length_B, 0)
    return AttentionMemory(keys, values, length_B.clamp(max=keys.shape[1]))


def earlier_shares(x: Tensor, share: RowShare) -> Iterator[Tensor]:
    """Yield each earlier shard's tensor, from the first shard on; zeros stand for ranks before the first."""
    for hop in range(share.size - 1, 0, -1):
        yield _shifted(x, share, hop)


def sum_over_shares(x: Tensor, share: RowShare) -> Tensor:
    """All-reduce the sum over the shards of a row; the gradient is all-reduced too."""
    return _SumOverShares.apply(x, share)  # type: ignore[return-value]


def of_last_share(x: Tensor, context: ContextGroup) -> Tensor:
    """Return the last shard's tensor on every rank, without a gradient."""
    if context.size == 1:
        return x
    x = x.detach().clone(memory_format=torch.contiguous_format)
    fill_from_last_share(x, context)
    return x


def fill_from_last_share(x: Tensor, context: ContextGroup) -> None:
    """Broadcast the last shard's tensor into x, in place."""
    dist.broadcast(x, dist.get_global_rank(_group(context), context.size - 1), group=context.group)


def value_of_last_share(value: Any, context: ContextGroup) -> Any:
    """Return the last shard's plain value on every rank."""
    return broadcast_value(value, dist.get_global_rank(_group(context), context.size - 1), context.group)


def of_all_shares(x_LB: Tensor, context: ContextGroup) -> Tensor:
    """All-gather a tensor of per-token values along its first axis, without a gradient."""
    parts = [torch.empty_like(x_LB, memory_format=torch.contiguous_format) for _ in range(context.size)]
    dist.all_gather(parts, x_LB.detach().contiguous(), group=_group(context))
    return torch.cat(parts)


def tensors_of_all_shares(tensors: Mapping[str, Tensor], context: ContextGroup) -> list[dict[str, Tensor]]:
    """All-gather every rank's named tensors to the CPU, one dictionary per shard in order, without gradients."""
    if context.size == 1:
        return [{name: tensor.detach().cpu() for name, tensor in tensors.items()}]
    return all_gather_tensors(tensors, _group(context))


def _group(context: ContextGroup) -> dist.ProcessGroup:
    assert context.group is not None
    return context.group


def _halo(x_BLC: Tensor, count: int, share: RowShare) -> Tensor:
    """Return the `count` tokens before this shard, from as many earlier shards as hold them; zeros before the row."""
    hops = math.ceil(count / share.length)
    parts = []
    for hop in range(hops, 0, -1):
        tokens = min(share.length, count - (hop - 1) * share.length)
        parts.append(_shifted(x_BLC[:, x_BLC.shape[1] - tokens :], share, hop))
    if len(parts) > 1:
        return torch.cat(parts, 1)
    return parts[0]


def _shifted(x: Tensor, share: RowShare, hop: int) -> Tensor:
    """Return the tensor of the rank `hop` before this one, or zeros if there is none. The gradient is sent back to
    that rank.
    """
    return _Shifted.apply(x, share, hop)  # type: ignore[return-value]


class _Shifted(torch.autograd.Function):
    """Point-to-point shift by `hop` ranks; the backward pass shifts the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RowShare, hop: int) -> Tensor:
        ctx.share = share
        ctx.hop = hop
        return _exchanged(x, share, hop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.share, -ctx.hop), None, None


class _SumOverShares(torch.autograd.Function):
    """All-reduce over the shards of a row, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RowShare) -> Tensor:
        ctx.share = share
        return _summed(x, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.share), None


def _summed(x: Tensor, share: RowShare) -> Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=share.group)
    return x


def _exchanged(x: Tensor, share: RowShare, hop: int) -> Tensor:
    """Send x to the rank `hop` after this one and return the tensor received from the rank `hop` before it."""
    x, received = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    calls = []
    for send, tensor, peer in ((dist.isend, x, share.rank + hop), (dist.irecv, received, share.rank - hop)):
        if 0 <= peer < share.size:
            calls.append(dist.P2POp(send, tensor, dist.get_global_rank(share.group, peer), share.group))
    for call in dist.batch_isend_irecv(calls) if calls else ():
        call.wait()
    return received
