"""Causal attention in torch, one query block at a time; with a window, time is linear in the row's length.

It runs on any device. On a CPU it is the fallback if the compiled implementation cannot run. Scores and masks exist for
one query block at a time, never for all queries and keys of a row.

A block's key span is the range of keys that its queries can reach. A span ends with the block's own tokens, so the
queries are the span's last tokens.

Legend: B rows (sequences in the batch), L tokens per row, S keys per row (remembered tokens before the row, then its L
tokens), H query heads, G key/value heads, K channels per head, N blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtron.ops.attention.reference import (
    AttentionInputs,
    AttentionKeys,
    attend_to_rows,
    visible_keys,
    with_memory,
)
from hybridtron.ops.dispatch import Implementation, untraced

BLOCK = 256
"""Number of queries in a block. On a CPU, 128 and 512 were slower at windows from 256 to 2048."""


@untraced  # torch.compile would trace the loop over blocks for minutes, and gain nothing
def blocked(inputs: AttentionInputs) -> Tensor:
    """Call scaled_dot_product_attention for each query block, with the block's mask.

    Without a window and without documents, a single call without a mask computes all queries.
    """
    q_BLHK = inputs.q_BLHK
    keys = with_memory(inputs)
    window = inputs.window
    if window is None or window >= keys.keys_BSGK.shape[1]:
        window = None
    if window is None and keys.documents_BS is None:
        return attend_to_rows(inputs)

    spans = _reach(keys, q_BLHK.shape[1], window)
    q_blocks = q_BLHK.transpose(1, 2).split(BLOCK, dim=2)
    # Without a window, spans can be as long as the row. If autograd kept the masks of all blocks, these would take
    # memory quadratic in the row's length. So if spans are long (`wide`), the backward pass recomputes each block's
    # attention. `_SharedSlices` is then not used, since it keeps the gradients of all slices at the same time.
    wide = window is None and sum(stop - start for start, stop in spans) > 8 * keys.keys_BSGK.shape[1]
    cut = _slices if wide else _SharedSlices.apply
    k_spans, v_spans = (cut(x.transpose(1, 2), spans) for x in (keys.keys_BSGK, keys.values_BSGK))
    masks = BlockMasks(keys, window, q_BLHK.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        mask = masks.of(q.shape[2], start, stop)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    y_blocks = []
    for q, k, v, span in zip(q_blocks, k_spans, v_spans, spans, strict=True):
        if wide:
            y_blocks.append(checkpoint(attend, q, k, v, *span, use_reentrant=False, preserve_rng_state=False))
        else:
            y_blocks.append(attend(q, k, v, *span))
    return torch.cat(y_blocks, dim=2).transpose(1, 2)


BLOCKED = Implementation("blocked", blocked)


class BlockMasks:
    """Additive masks (0 or -inf), each for one query block and its key span.

    Without documents, a mask depends only on its shape, and is built once per shape.
    """

    def __init__(self, keys: AttentionKeys, window: int | None, dtype: torch.dtype) -> None:
        self.keys = keys
        self.window = window
        self.dtype = dtype
        self.made: dict[tuple[int, int], Tensor] = {}

    def of(self, queries: int, start: int, stop: int) -> Tensor:
        """Return the mask for keys `start` to `stop` - 1. The last `queries` tokens of this range are the queries."""
        shape = (queries, stop - start)
        if (mask := self.made.get(shape)) is None:
            visible = visible_keys(self.keys, start, stop, queries, self.window)
            zeros = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            mask = zeros.masked_fill_(~visible, -torch.inf)
            if self.keys.documents_BS is None:
                self.made[shape] = mask
        return mask


def _slices(x_BGSK: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Return views of x, one for each span on its third axis. Spans may overlap."""
    return tuple(x_BGSK[:, :, start:stop] for start, stop in spans)


class _SharedSlices(torch.autograd.Function):
    """Autograd version of `_slices` that accumulates all slices' gradients in one buffer.

    In torch's own backward pass, each slice gets a gradient tensor as long as the row, so the work for all slices is
    quadratic in L.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        ctx.spans = spans
        return _slices(x, spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (start, stop), grad in zip(ctx.spans, grads, strict=True):
            total[:, :, start:stop] += grad
        return total, None


def _reach(keys: AttentionKeys, length: int, window: int | None) -> list[tuple[int, int]]:
    """Return each block's key span (start, stop); all rows in the batch have equal spans."""
    total = keys.keys_BSGK.shape[1]
    places = range(total - length, total, BLOCK)
    starts = [0 if window is None else max(0, place - window + 1) for place in places]
    if keys.documents_BS is not None and keys.documents_BS.device.type == "cpu":
        # A block sees no key before the document of its first query, so its span begins there. On a GPU the span is
        # not shortened, since the host would have to wait for the device to read where documents begin.
        documents_BS = keys.documents_BS.contiguous()
        firsts_BN = documents_BS[:, total - length :: BLOCK].contiguous()
        begins = torch.searchsorted(documents_BS, firsts_BN).amin(0).tolist()
        starts = [max(pair) for pair in zip(starts, begins, strict=True)]
    return [(start, min(place + BLOCK, total)) for start, place in zip(starts, places, strict=True)]
