"""Attention by blocks of queries, each over the keys that it can reach: with a window, linear in the row's length.

Runs on any device, and is the fallback of a CPU on which the compiled form cannot run. Scores and masks of the row's
length squared never exist at once.

Legend as in `reference`; a block's queries are the last tokens of its span of keys.
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
"""Queries of a block. On a CPU, 128 and 512 were slower at windows from 256 to 2048."""


@untraced  # a loop of many operations: tracing it takes minutes and gains nothing
def blocked(inputs: AttentionInputs) -> Tensor:
    """Run torch's own attention block by block, each block with its part of the mask."""
    q_BLHK = inputs.q_BLHK
    keys = with_memory(inputs)
    window = inputs.window
    if window is None or window >= keys.keys_BSGK.shape[1]:
        window = None
    if window is None and keys.documents_BS is None:
        return attend_to_rows(inputs)

    spans = _reach(keys, q_BLHK.shape[1], window)
    q_blocks = q_BLHK.transpose(1, 2).split(BLOCK, dim=2)
    # Without a window, spans can be as long as the row: all their masks or gradients at once would then be quadratic.
    wide = window is None and sum(stop - start for start, stop in spans) > 8 * keys.keys_BSGK.shape[1]
    cut = _slices if wide else _SharedSlices.apply
    k_spans, v_spans = (cut(x.transpose(1, 2), spans) for x in (keys.keys_BSGK, keys.values_BSGK))
    masks = BlockMasks(keys, window, q_BLHK.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        mask = masks.of(q.shape[2], start, stop)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    y_blocks = []
    for q, k, v, span in zip(q_blocks, k_spans, v_spans, spans, strict=True):
        if wide:  # backward builds the mask again instead of keeping it
            y_blocks.append(checkpoint(attend, q, k, v, *span, use_reentrant=False, preserve_rng_state=False))
        else:
            y_blocks.append(attend(q, k, v, *span))
    return torch.cat(y_blocks, dim=2).transpose(1, 2)


BLOCKED = Implementation("blocked", blocked)


class BlockMasks:
    """Additive masks of blocks over their spans of keys. Without documents, blocks of equal shape share a mask."""

    def __init__(self, keys: AttentionKeys, window: int | None, dtype: torch.dtype) -> None:
        self.keys = keys
        self.window = window
        self.dtype = dtype
        self.made: dict[tuple[int, int], Tensor] = {}

    def of(self, queries: int, start: int, stop: int) -> Tensor:
        """Return the mask over the keys start:stop for the last `queries` tokens among them."""
        shape = (queries, stop - start)
        if (mask := self.made.get(shape)) is None:
            visible = visible_keys(self.keys, start, stop, queries, self.window)
            zeros = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            mask = zeros.masked_fill_(~visible, -torch.inf)
            if self.keys.documents_BS is None:
                self.made[shape] = mask
        return mask


def _slices(x_BGSK: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Return overlapping spans of keys, as views."""
    return tuple(x_BGSK[:, :, start:stop] for start, stop in spans)


class _SharedSlices(torch.autograd.Function):
    """Autograd function like `_slices` that accumulates the gradients in one buffer.

    The gradient of a plain slice is as long as the row, which over all blocks is quadratic in L.
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
    """Return each query block's widest span of visible keys; the block itself ends its span."""
    total = keys.keys_BSGK.shape[1]
    places = range(total - length, total, BLOCK)
    starts = [0 if window is None else max(0, place - window + 1) for place in places]
    if keys.documents_BS is not None and keys.documents_BS.device.type == "cpu":
        # Keys before the document of a block's first query can't be seen. On a GPU the host would wait to learn this.
        documents_BS = keys.documents_BS.contiguous()
        firsts_BN = documents_BS[:, total - length :: BLOCK].contiguous()
        begins = torch.searchsorted(documents_BS, firsts_BN).amin(0).tolist()
        starts = [max(pair) for pair in zip(starts, begins, strict=True)]
    return [(start, min(place + BLOCK, total)) for start, place in zip(starts, places, strict=True)]
