"""Causal softmax attention: full or in a sliding window, with grouped keys, documents and remembered keys.

    y_i = sum_j a_ij v_j,   a_i = softmax over the visible j of  q_i . k_j / sqrt(K)

Token i sees j <= i, in a window of w only itself and the w - 1 tokens before it, and only its own document. Remembered
keys count as the tokens just before the row, in the row's first document. Positions are not applied here: queries and
keys arrive rotated. No dropout, no bias, no attention to the future.

Legend: B rows, L tokens, H query heads, G key/value heads (query head h reads h // (H // G)), K head size, M remembered
tokens, S = M + L keys in all. `_Q` is a block of the queries, `_C` the span of keys that it can reach.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtron.device import is_deterministic, optional_package
from hybridtron.ops.dispatch import op
from hybridtron.ops.norm.reference import at_least_fp32

BLOCK = 256
"""Queries that the blocked form takes at a time: on a CPU 128 and 512 were slower at windows from 256 to 2048."""
FLASH = "flash_attn.flash_attn_interface"  # of flash-attn 2: other packages have a `flash_attn` without these functions


class Memory(NamedTuple):
    """Keys (rotated) and values of tokens before a row; the last length_B[b] of the M entries of row b are real."""

    keys_BMGK: Tensor
    values_BMGK: Tensor
    length_B: Tensor


def remember(
    memory: Memory | None, k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, keep: int | None
) -> Memory:
    """The memory after a row: its last `keep` tokens, zeros before them where there are fewer; None keeps every token.

    With `keep` the shape never changes from row to row, without it M grows by L.
    """
    batch, length = k_BLGK.shape[:2]
    if documents_BL is None:
        own_B = torch.full((batch,), length, device=k_BLGK.device)
        whole_B = torch.ones(batch, dtype=torch.bool, device=k_BLGK.device)
    else:
        own_B = (documents_BL == documents_BL[:, -1:]).sum(1)
        whole_B = own_B == length
    keys, values, length_B = k_BLGK, v_BLGK, own_B
    if memory is not None:
        keys = torch.cat((memory.keys_BMGK, keys), dim=1)
        values = torch.cat((memory.values_BMGK, values), dim=1)
        length_B = own_B + torch.where(whole_B, memory.length_B, 0)
    if keep is None:
        return Memory(keys, values, length_B)
    missing = max(0, keep - keys.shape[1])
    start = keys.shape[1] + missing - keep
    keys, values = (F.pad(x[:, start:], (0, 0, 0, 0, missing, 0)) for x in (keys, values))
    return Memory(keys, values, length_B.clamp(max=keep))


class _Keys(NamedTuple):
    """Keys and values with the memory in front, and their documents (None: all are one). The row's tokens are last."""

    keys_BSGK: Tensor
    values_BSGK: Tensor
    documents_BS: Tensor | None


def _with_memory(k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, memory: Memory | None) -> _Keys:
    """Put the memory before the row; its padding gets a document of its own, so that no query matches it."""
    if memory is None:
        return _Keys(k_BLGK, v_BLGK, documents_BL)
    if documents_BL is None:
        documents_BL = torch.zeros(k_BLGK.shape[:2], dtype=torch.int64, device=k_BLGK.device)
    back_M = torch.arange(memory.keys_BMGK.shape[1], 0, -1, device=k_BLGK.device)
    memory_documents_BM = torch.where(back_M <= memory.length_B[:, None], documents_BL[:, :1], -1)
    return _Keys(
        torch.cat((memory.keys_BMGK, k_BLGK), dim=1),
        torch.cat((memory.values_BMGK, v_BLGK), dim=1),
        torch.cat((memory_documents_BM, documents_BL), dim=1),
    )


def _visible(keys: _Keys, start: int, stop: int, queries: int, window: int | None) -> Tensor:
    """The rules: which keys of start:stop each of the last `queries` tokens among them sees, (Q, C) or (B, 1, Q, C)."""
    places_C = torch.arange(stop - start, device=keys.keys_BSGK.device)
    distance_QC = places_C[-queries:, None] - places_C
    visible_QC = distance_QC >= 0
    if window is not None:
        visible_QC &= distance_QC < window
    if keys.documents_BS is None:
        return visible_QC
    documents_BC = keys.documents_BS[:, start:stop]
    same_BQC = documents_BC[:, -queries:, None] == documents_BC[:, None]
    return (visible_QC & same_BQC)[:, None]


@op
def attention(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """Attention by the rules, with a dense mask and an fp32 softmax. Documents count up along a row."""
    keys = _with_memory(k_BLGK, v_BLGK, documents_BL, memory)
    visible = _visible(keys, 0, keys.keys_BSGK.shape[1], q_BLHK.shape[1], window)
    share = q_BLHK.shape[2] // k_BLGK.shape[2]
    k_BSHK, v_BSHK = (at_least_fp32(x).repeat_interleave(share, dim=2) for x in (keys.keys_BSGK, keys.values_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", at_least_fp32(q_BLHK), k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK).to(q_BLHK.dtype)


def _refuse_flash(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> str | None:
    if q_BLHK.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {q_BLHK.dtype}"
    if q_BLHK.shape[-1] > 256:
        return f"takes heads of at most 256 channels, not {q_BLHK.shape[-1]}"
    # It could skip no padding in front of the keys, which a memory has wherever rows remember unequally much.
    return None if memory is None else "takes no remembered keys"


@attention.form("flash-attn", device="cuda", package=FLASH, refuses=_refuse_flash)
def _flash(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """The kernels of the flash_attn package; unmeasured, and run so far only against an emulation of the package."""
    flash = optional_package(FLASH).module
    assert flash is not None
    assert memory is None
    sides = (-1, -1) if window is None else (window - 1, 0)
    if documents_BL is None:
        return flash.flash_attn_func(
            q_BLHK, k_BLGK, v_BLGK, causal=True, window_size=sides, deterministic=is_deterministic()
        )
    batch, length = documents_BL.shape
    starts_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=True)
    # How many documents there are is known only on the device: this waits for it.
    borders = F.pad(starts_BL.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    y = flash.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_BLHK, k_BLGK, v_BLGK)),
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=length,
        max_seqlen_k=length,
        causal=True,
        window_size=sides,
        deterministic=is_deterministic(),
    )
    return y.view_as(q_BLHK)


def _refuse_sdpa(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> str | None:
    if window is not None and window < q_BLHK.shape[1]:
        return "takes no window"
    return None if documents_BL is None and memory is None else "takes neither documents nor memory"


@attention.form("sdpa", device="cuda", refuses=_refuse_sdpa)
def _sdpa(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """torch's own attention, causal over the whole row."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _slices(x_BGSK: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Overlapping spans of keys, as views."""
    return tuple(x_BGSK[:, :, start:stop] for start, stop in spans)


class _Spans(torch.autograd.Function):
    """`_slices`, but their gradients are added up in one buffer.

    A plain slice brings a gradient as long as the row, which is quadratic in L over all blocks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.spans = x.shape, spans
        return _slices(x, spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (start, stop), grad in zip(ctx.spans, grads, strict=True):
            total[:, :, start:stop] += grad
        return total, None


def _reach(keys: _Keys, length: int, window: int | None) -> list[tuple[int, int]]:
    """For each block of queries, the span of keys that it can see at most; the block is the end of its span."""
    total = keys.keys_BSGK.shape[1]
    places = range(total - length, total, BLOCK)
    starts = [0 if window is None else max(0, place - window + 1) for place in places]
    if keys.documents_BS is not None and keys.documents_BS.device.type == "cpu":
        # Nothing before the document of a block's first query can be seen. On a GPU, to read this would be to wait.
        documents_BS = keys.documents_BS.contiguous()
        firsts_BN = documents_BS[:, total - length :: BLOCK].contiguous()
        begins = torch.searchsorted(documents_BS, firsts_BN).amin(0).tolist()
        starts = [max(pair) for pair in zip(starts, begins, strict=True)]
    return [(start, min(place + BLOCK, total)) for start, place in zip(starts, places, strict=True)]


@attention.form("blocked")
@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def _blocked(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """Blocks of queries over the keys that they can reach: time and memory linear in L where a window is set."""
    keys = _with_memory(k_BLGK, v_BLGK, documents_BL, memory)
    window = None if window is None or window >= keys.keys_BSGK.shape[1] else window
    if window is None and keys.documents_BS is None:
        return _sdpa(q_BLHK, k_BLGK, v_BLGK, None, None, None)

    spans = _reach(keys, q_BLHK.shape[1], window)
    q_blocks = q_BLHK.transpose(1, 2).split(BLOCK, dim=2)
    # Without a window, spans can be as long as the row: then all their masks or gradients at once would be quadratic.
    wide = window is None and sum(stop - start for start, stop in spans) > 8 * keys.keys_BSGK.shape[1]
    cut = _slices if wide else _Spans.apply
    k_spans, v_spans = (cut(x.transpose(1, 2), spans) for x in (keys.keys_BSGK, keys.values_BSGK))
    masks: dict[tuple[int, int], Tensor] = {}

    def block(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        shape = (q.shape[2], stop - start)
        if (mask := masks.get(shape)) is None:
            visible = _visible(keys, start, stop, q.shape[2], window)
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
            if keys.documents_BS is None:  # then all inner blocks have the same
                masks[shape] = mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    y_blocks = []
    for q, k, v, span in zip(q_blocks, k_spans, v_spans, spans, strict=True):
        if wide:  # backward makes the mask again
            y_blocks.append(checkpoint(block, q, k, v, *span, use_reentrant=False, preserve_rng_state=False))
        else:
            y_blocks.append(block(q, k, v, *span))
    return torch.cat(y_blocks, dim=2).transpose(1, 2)
