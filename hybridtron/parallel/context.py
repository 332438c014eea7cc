"""Rows that are cut over ranks: each has a share of every row's tokens, in order; layers hand over what comes before.

    recurrences     every one is affine in its state: a share turns h into T h + e. With T and e of the shares before it
                    a rank knows the state that its share starts from, and runs from there
    convolutions    the last tokens of the share before (a halo); of several shares where a window is longer than one
    attention       keys and values likewise: a window's, or all of them
    spans           all keys and values before, and of every share's blocks what they are chosen by
    sparse          of every share before the keys that later queries can still see (`ops/sparse/memory.py`)

Gradients return by the way on which this was handed over. The states that a
row starts from, and those that it ends in, are the same on all ranks of a group. Documents are those of the whole row:
nothing of one reaches a share that begins with another.

Letters: B rows, L tokens of a share, T those before it that a layer reads, C any other axes.
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
from hybridtron.ops.total import Factors, Matrices
from hybridtron.parallel.cut import RankGroup
from hybridtron.parallel.plain_values import all_gather_tensors, broadcast_value


@dataclass(frozen=True)
class ContextGroup(RankGroup):
    """The ranks that share the tokens of every row, and this one's place among them."""

    group: dist.ProcessGroup | None = None


WHOLE_ROWS = ContextGroup()


def own_share(batch: Batch, context: ContextGroup) -> Batch:
    """This rank's tokens of the rows, and what it must know of those before them.

    Rows may be whole, or cut when they were read (`data/row_parts.py`).
    """
    if context.size == 1:
        return batch
    if (read := batch.seq.share) is not None:
        assert (read.size, read.rank) == (context.size, context.rank)
        return replace(batch, seq=replace(batch.seq, share=replace(read, group=context.group)))
    here = own_tokens(batch.tokens_BL.shape[1], context)
    tokens_BL, labels_BL, mask_BL = (t[:, here] for t in (batch.tokens_BL, batch.labels_BL, batch.mask_BL))
    return Batch(tokens_BL, labels_BL, mask_BL, seq_of_share(batch.seq, context), batch.continues_B)


def own_tokens(length: int, context: ContextGroup) -> slice:
    """Which of a row's tokens this rank has; the ranks divide the length."""
    each = length // context.size
    return slice(context.rank * each, (context.rank + 1) * each)


def seq_of_share(seq: SeqInfo, context: ContextGroup) -> SeqInfo:
    """Where this rank's tokens stand, of rows whose tokens are shared out over several."""
    documents_BL, (rows, length) = seq.documents_BL, seq.positions_BL.shape
    here, device = own_tokens(length, context), seq.positions_BL.device
    first, each = here.start, here.stop - here.start
    if documents_BL is None:
        behind_B, unbroken_B = (
            torch.full((rows,), first, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
        )
    else:
        own_BL = documents_BL[:, here]
        behind_B = (documents_BL[:, :first] == own_BL[:, :1]).sum(1)
        unbroken_B = own_BL[:, 0] == own_BL[:, -1]
    share = RowShare(context.size, context.rank, context.group, seq.spans(), each, behind_B, unbroken_B)
    return replace(seq.map(lambda t: t[:, here].contiguous()), share=share).bordered()


Inputs = TypeVar("Inputs", bound=tuple[Any, ...])


def read_twice(inputs: Inputs, seq: SeqInfo) -> Inputs:
    """A recurrence's inputs, which a share runs through twice: one copy, where each run would keep its own."""
    if seq.share is None:
        return inputs
    return type(inputs)(*(x.contiguous() if isinstance(x, Tensor) else x for x in inputs))


Scan = Callable[[Tensor | None], tuple[Tensor, Tensor]]


def scan_from(
    scan: Scan, state: Tensor | None, seq: SeqInfo, total: Callable[[], Factors | Matrices]
) -> tuple[Tensor, Tensor]:
    """A recurrence over this share: outputs, and the state after it. `scan` runs it from a state, None for zeros.

    `total` says what a share leaves of the state before it.
    """
    if seq.share is None:
        return scan(state)
    return scan(state_before(scan(None)[1], total(), state, seq.share))


def state_before(added: Tensor, total: Factors | Matrices | None, state: Tensor | None, share: RowShare) -> Tensor:
    """The state before this share: what the shares before it leave of the row's initial state, and what they add.

    With e_r and T_r of every share, those of shares 0 to r - 1 together come by doubling: in each round a rank takes
    what a rank 1, 2, 4 ... before it has so far. Without a total a share leaves all.
    """
    apply = torch.matmul if isinstance(total, Matrices) else torch.mul
    wide = (-1, *[1] * (added.dim() - 1))
    enters, passes = share.enters_B.view(wide), (share.enters_B & share.unbroken_B).view(wide)
    through = torch.ones_like(added) if total is None else _multiplier(total)
    through = torch.where(passes, through, 0)
    one = through.new_ones(through.shape[-1]).diag() if isinstance(total, Matrices) else through.new_ones(())
    through, added = _shifted(through, share, 1), _shifted(added, share, 1)
    through = through if share.rank else through + one  # zeros came: nothing is before the first share
    hop = 1
    while hop < share.size - 1:
        earlier, earlier_added = _shifted(through, share, hop), _shifted(added, share, hop)
        earlier = earlier if share.rank >= hop else earlier + one
        added, through = added + apply(through, earlier_added), apply(through, earlier)
        hop *= 2
    if state is not None:
        added = added + apply(through, state.to(added.dtype))
    return torch.where(enters, added, 0)


def _multiplier(total: Factors | Matrices) -> Tensor:
    return total.matrix_BHNN if isinstance(total, Matrices) else total.factor


def tokens_before(x_BLC: Tensor, count: int, carried_BTC: Tensor | None, seq: SeqInfo) -> Tensor | None:
    """The last `count` tokens before this share, of its first document: zeros for others, and where there are none.

    The first share has those that are carried from the row before. On one rank these are all.
    """
    share = seq.share
    if share is None:
        return carried_BTC
    found_BTC = _halo(x_BLC, count, share)
    real = min(count, share.first)
    if carried_BTC is not None and real < count:
        found_BTC = torch.cat((carried_BTC[:, real - count :].to(found_BTC.dtype), found_BTC[:, count - real :]), 1)
    back_T = torch.arange(count, 0, -1, device=x_BLC.device)
    own_BT = (back_T <= share.behind_B[:, None]) | share.reaches_B[:, None]
    return torch.where(own_BT.view(*own_BT.shape, *[1] * (x_BLC.dim() - 2)), found_BTC, 0)


def memory_before(
    k_BLGK: Tensor, v_BLGK: Tensor, window: int | None, carried: AttentionMemory | None, seq: SeqInfo
) -> AttentionMemory | None:
    """The keys and values before this share that a window reaches, or all of the row, behind those that are carried."""
    share = seq.share
    if share is None:
        return carried
    count = share.length * (share.size - 1) if window is None else window - 1
    real = min(count, share.first)
    found_BTGK = _halo(torch.cat((k_BLGK, v_BLGK), -1), count, share)[:, count - real :]
    keys, values = found_BTGK.split((k_BLGK.shape[-1], v_BLGK.shape[-1]), -1)
    length_B = share.behind_B
    if carried is not None:
        most = carried.keys_BMGK.shape[1] if window is None else count - real
        older = slice(max(0, carried.keys_BMGK.shape[1] - most), None)
        keys = torch.cat((carried.keys_BMGK[:, older], keys), 1)
        values = torch.cat((carried.values_BMGK[:, older], values), 1)
        length_B = length_B + torch.where(share.reaches_B, carried.length_B, 0)
    return AttentionMemory(keys, values, length_B.clamp(max=keys.shape[1]))


def earlier_shares(x: Tensor, share: RowShare) -> Iterator[Tensor]:
    """What each of the other shares before this one has, the first one first; zeros where there is none."""
    for hop in range(share.size - 1, 0, -1):
        yield _shifted(x, share, hop)


def sum_over_shares(x: Tensor, share: RowShare) -> Tensor:
    """The sum over the shares of a row, on every rank of which its gradient is summed likewise."""
    return _SumOverShares.apply(x, share)  # type: ignore[return-value]


def of_last_share(x: Tensor, context: ContextGroup) -> Tensor:
    """What the rank with the last share has, on every rank; without a gradient."""
    if context.size == 1:
        return x
    x = x.detach().clone(memory_format=torch.contiguous_format)
    fill_from_last_share(x, context)
    return x


def fill_from_last_share(x: Tensor, context: ContextGroup) -> None:
    """Write what the rank with the last share has over what the others have."""
    dist.broadcast(x, dist.get_global_rank(_group(context), context.size - 1), group=context.group)


def value_of_last_share(value: Any, context: ContextGroup) -> Any:
    """The plain value of the rank with the last share, on every rank."""
    return broadcast_value(value, dist.get_global_rank(_group(context), context.size - 1), context.group)


def of_all_shares(x_LB: Tensor, context: ContextGroup) -> Tensor:
    """What all shares have of their tokens, along the first axis, on every rank; without a gradient."""
    parts = [torch.empty_like(x_LB, memory_format=torch.contiguous_format) for _ in range(context.size)]
    dist.all_gather(parts, x_LB.detach().contiguous(), group=_group(context))
    return torch.cat(parts)


def tensors_of_all_shares(tensors: Mapping[str, Tensor], context: ContextGroup) -> list[dict[str, Tensor]]:
    """Tensors of every share's rank by name, on the CPU, the first share's first; without gradients."""
    if context.size == 1:
        return [{name: tensor.detach().cpu() for name, tensor in tensors.items()}]
    return all_gather_tensors(tensors, _group(context))


def _group(context: ContextGroup) -> dist.ProcessGroup:
    assert context.group is not None
    return context.group


def _halo(x_BLC: Tensor, count: int, share: RowShare) -> Tensor:
    """The `count` tokens before this share, from as many shares before it as hold them; zeros before the row."""
    hops = math.ceil(count / share.length)
    parts = []
    for hop in range(hops, 0, -1):
        tokens = min(share.length, count - (hop - 1) * share.length)
        parts.append(_shifted(x_BLC[:, x_BLC.shape[1] - tokens :], share, hop))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _shifted(x: Tensor, share: RowShare, hop: int) -> Tensor:
    """What the rank `hop` before this one has, zeros where there is none; its gradient returns there."""
    return _Shifted.apply(x, share, hop)  # type: ignore[return-value]


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RowShare, hop: int) -> Tensor:
        ctx.share, ctx.hop = share, hop
        return _exchanged(x, share, hop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.share, -ctx.hop), None, None


class _SumOverShares(torch.autograd.Function):
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
    """Sent to the rank `hop` after this one, for what the one `hop` before it sends."""
    x, found = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    calls = []
    for send, tensor, other in ((dist.isend, x, share.rank + hop), (dist.irecv, found, share.rank - hop)):
        if 0 <= other < share.size:
            calls.append(dist.P2POp(send, tensor, dist.get_global_rank(share.group, other), share.group))
    for call in dist.batch_isend_irecv(calls) if calls else ():
        call.wait()
    return found
