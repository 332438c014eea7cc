"""Span-expanded attention on a CPU: a few chunks at a time, their chosen blocks gathered in front of their own keys.

Time and memory are linear in L. Backward gathers again, because the gathered blocks would take several times the memory
of all keys and values. It recomputes the weights from the kept log-sum-exps, as flash attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.span.reference import SpanCut, SpanInputs, chunk_spans

AT_ONCE = 2048
"""Maximum number of tokens that are computed together, unless a single chunk has more."""
BLOCK = 256
"""Queries of a chunk that are computed together; keys after the last of these queries are skipped."""
_flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)


class ChunkRun(NamedTuple):
    """Consecutive chunks that are computed together: slices of their queries, own keys and the blocks to choose from.

    All have the same size, equally many chosen blocks, and equally many own keys before the first query.
    """

    rows: slice
    chunks: int
    queries: slice
    keys: slice
    blocks: slice
    chosen_RGTC: Tensor | None

    @property
    def size(self) -> int:
        """Queries per chunk."""
        return (self.queries.stop - self.queries.start) // self.chunks


def _parts(cut: SpanCut, chosen: Sequence[Tensor | None], length: int, total: int) -> Iterator[ChunkRun]:
    """Yield all chunks, grouped into runs that can be computed together."""
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        most = 0 if chosen_RGTC is None else chosen_RGTC.shape[-1]
        spans = list(chunk_spans(cut, segment, total - length, most))
        together = max(1, AT_ONCE // (segment.stop - segment.start))
        for row in range(segment.rows.start, segment.rows.stop, together):
            rows = slice(row, min(row + together, segment.rows.stop))
            room = max(1, AT_ONCE // ((rows.stop - rows.start) * cut.chunk))
            first = 0
            while first < len(spans):
                last = first + 1
                while last < len(spans) and last - first < room and spans[first].continues(spans[last], cut.chunk):
                    last += 1
                first_span = spans[first]
                other = spans[last - 1]
                count = spans[first].count
                of_rows = slice(rows.start - segment.rows.start, rows.stop - segment.rows.start)
                if not count or chosen_RGTC is None:
                    blocks = None
                else:
                    blocks = chosen_RGTC[of_rows, :, first:last, :count]
                queries = slice(first_span.queries.start, other.queries.stop)
                keys = slice(first_span.keys.start, other.keys.stop)
                yield ChunkRun(rows, last - first, queries, keys, segment.keys(length, total), blocks)
                first = last


def _cut_up(x_BLHK: Tensor, rows: slice, tokens: slice, chunks: int) -> Tensor:
    """Return the chunks of a run as (rows x chunks, heads, tokens, K)."""
    return x_BLHK[rows, tokens].unflatten(1, (chunks, -1)).flatten(0, 1).transpose(1, 2)


def _index(part: ChunkRun) -> tuple[Tensor, ...]:
    """Return the index of a run's chosen blocks into (R, U, G, S, K)."""
    assert part.chosen_RGTC is not None
    rows, groups = part.chosen_RGTC.shape[:2]
    return torch.arange(rows)[:, None, None, None], part.chosen_RGTC, torch.arange(groups)[:, None, None]


def _blocks(x_BSGK: Tensor, part: ChunkRun, block: int) -> Tensor:
    """Return a view of the blocks that a run can choose from, (R, U, G, S, K)."""
    count = (part.blocks.stop - part.blocks.start) // block
    return x_BSGK[part.rows, part.blocks][:, : count * block].unflatten(1, (count, block)).transpose(2, 3)


def _read(x_BSGK: Tensor, part: ChunkRun, block: int) -> Tensor:
    """Gather keys or values of a run: its chosen blocks, then its own tokens; (rows x chunks, G, ..., K)."""
    own_tokens = _cut_up(x_BSGK, part.rows, part.keys, part.chunks)
    if part.chosen_RGTC is None:
        return own_tokens
    rows, _, chunks, count = part.chosen_RGTC.shape
    gathered = own_tokens.new_empty(*own_tokens.shape[:2], count * block + own_tokens.shape[2], own_tokens.shape[3])
    gathered[:, :, count * block :] = own_tokens
    into = gathered[:, :, : count * block].unflatten(2, (count, block)).unflatten(0, (rows, chunks))
    into.copy_(_blocks(x_BSGK, part, block)[_index(part)].transpose(1, 2))
    return gathered


def _add(total_BSGK: Tensor, grad: Tensor, part: ChunkRun, block: int) -> None:
    """Add the gradient of a run's gathered keys or values to the places that they were gathered from."""
    own_count = part.keys.stop - part.keys.start
    rows = part.rows.stop - part.rows.start
    of_own = grad[:, :, -(own_count // part.chunks) :].transpose(1, 2).unflatten(0, (rows, part.chunks))
    total_BSGK[part.rows, part.keys].unflatten(1, (part.chunks, -1)).add_(of_own)
    if part.chosen_RGTC is None:
        return
    count = part.chosen_RGTC.shape[-1]
    of_blocks = grad[:, :, : count * block].unflatten(2, (count, block)).unflatten(0, (rows, part.chunks))
    _blocks(total_BSGK, part, block).index_put_(_index(part), of_blocks.transpose(1, 2), accumulate=True)


def _steps(
    part: ChunkRun, q: Tensor, block: int, masks: dict[tuple[int, int, int], Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of a run's queries, each with its mask over the gathered keys up to its last query."""
    if part.chosen_RGTC is None:
        count = 0
    else:
        count = part.chosen_RGTC.shape[-1] * block
    own_count = (part.keys.stop - part.keys.start) // part.chunks
    for start in range(0, part.size, BLOCK):
        stop = min(start + BLOCK, part.size)
        before = count + own_count - part.size + start
        shape = (stop - start, before, count)
        if (mask := masks.get(shape)) is None:
            ones = torch.ones(stop - start, before + stop - start, dtype=torch.bool)
            mask = torch.zeros(ones.shape, dtype=q.dtype).masked_fill_(ones.triu(before + 1), -torch.inf)
            masks[shape] = mask
        yield slice(start, stop), mask


class _BlockedSpanAttention(torch.autograd.Function):
    """Attention of every chunk over its chosen blocks and its own tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cut: SpanCut, chosen: Sequence[Tensor | None]) -> Tensor:
        y = torch.empty(q.shape, dtype=q.dtype)
        sums_BLH = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        masks: dict[tuple[int, int, int], Tensor] = {}
        for part in _parts(cut, chosen, q.shape[1], k.shape[1]):
            asking = _cut_up(q, part.rows, part.queries, part.chunks)
            keys, values = (_read(x, part, cut.block) for x in (k, v))
            rows = part.rows.stop - part.rows.start
            y_part, sums_part = (x[part.rows, part.queries].unflatten(1, (part.chunks, -1)) for x in (y, sums_BLH))
            for here, mask in _steps(part, q, cut.block, masks):
                seen = mask.shape[1]
                y_here, sums = _flash(asking[:, :, here], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask)
                y_part[:, :, here] = y_here.transpose(1, 2).unflatten(0, (rows, -1))
                sums_part[:, :, here] = sums.transpose(1, 2).unflatten(0, (rows, -1))
        ctx.save_for_backward(q, k, v, y, sums_BLH)
        ctx.cut = cut
        ctx.chosen = chosen
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums_BLH = ctx.saved_tensors
        of_q, of_k, of_v = torch.empty(q.shape, dtype=q.dtype), *(torch.zeros(x.shape, dtype=x.dtype) for x in (k, v))
        masks: dict[tuple[int, int, int], Tensor] = {}
        for part in _parts(ctx.cut, ctx.chosen, q.shape[1], k.shape[1]):
            q_part, y_part, grad_part = (_cut_up(x, part.rows, part.queries, part.chunks) for x in (q, y, grad))
            sums_part = _cut_up(sums_BLH[..., None], part.rows, part.queries, part.chunks)[..., 0]
            read = [_read(x, part, ctx.cut.block) for x in (k, v)]
            of_q_part = of_q[part.rows, part.queries].unflatten(1, (part.chunks, -1))
            of_read: list[Tensor] = []
            for here, mask in reversed(list(_steps(part, q, ctx.cut.block, masks))):
                asked = (x[:, :, here] for x in (grad_part, q_part))
                seen = (x[:, :, : mask.shape[1]] for x in read)
                y_here = y_part[:, :, here]
                sums_here = sums_part[:, :, here].contiguous()
                of_asked, *of_seen = _flash_backward(*asked, *seen, y_here, sums_here, 0.0, False, attn_mask=mask)
                of_q_part[:, :, here] = of_asked.transpose(1, 2).unflatten(0, (of_q_part.shape[0], -1))
                if not of_read:  # the last queries see all gathered keys
                    of_read = of_seen
                    continue
                for total, more in zip(of_read, of_seen, strict=True):
                    total[:, :, : mask.shape[1]] += more
            for total, more in zip((of_k, of_v), of_read, strict=True):
                _add(total, more, part, ctx.cut.block)
        return of_q, of_k, of_v, None, None


@untraced  # a loop whose length depends on the boundaries of documents
def blocked(inputs: SpanInputs) -> Tensor:
    """Compute attention over gathered blocks, a run of chunks at a time."""
    return _BlockedSpanAttention.apply(*inputs)


BLOCKED = Implementation("blocked", blocked, "cpu")
