"""Causal softmax attention: full or in a sliding window, with grouped keys, documents and remembered keys.

    y_i = sum_j a_ij v_j,   a_i = softmax_j(q_i . k_j / sqrt(K)) over the visible j

Token i sees the tokens j <= i in its own document; with a window of w, it sees only itself and the w - 1 tokens before
it. `documents_BL` has each token's document number. Along a row, document numbers never decrease.

A row is one sequence in the batch. Its first document may have begun in a row of an earlier call. The earlier tokens'
keys and values are then passed as `AttentionMemory`. They count as tokens of the row's first document, just before the
row.

Queries and keys have already been rotated by their positions (RoPE). There is no dropout and no bias.

Legend: B rows, L tokens per row, H query heads, G key/value heads (query head h reads key/value head h // (H // G)), K
channels per head, M remembered tokens per row, S = M + L keys per row, E document boundaries. A block has Q consecutive
queries and C consecutive keys; the C keys include every key that a query of the block sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class AttentionMemory(NamedTuple):
    """Remembered tokens: rotated keys and values for the M tokens before each row.

    Only the last length_B[b] entries for row b are tokens of the row's first document. Earlier entries are padding, or
    tokens from other documents, and no query sees them.
    """

    keys_BMGK: Tensor
    values_BMGK: Tensor
    length_B: Tensor


def joined(memory: AttentionMemory | None, k_BLGK: Tensor, v_BLGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return all keys and all values (B, S, G, K): first from the memory (if there is a memory), then from the row."""
    if memory is None:
        return k_BLGK, v_BLGK
    return torch.cat((memory.keys_BMGK, k_BLGK), dim=1), torch.cat((memory.values_BMGK, v_BLGK), dim=1)


def remember(
    memory: AttentionMemory | None, k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, keep: int | None
) -> AttentionMemory:
    """Return the memory for the next call; the rows of that call continue the rows of this call.

    If `keep` is None, the new memory has all entries of `memory` and all L tokens. Else it has only the last `keep` of
    them, with zeros in front if there are fewer. The new `length_B` counts only tokens of the row's last document,
    since the next call's row can continue only this document.
    """
    batch, length = k_BLGK.shape[:2]
    if documents_BL is None:
        in_last_document_B = torch.full((batch,), length, device=k_BLGK.device)
        is_one_document_B = torch.ones(batch, dtype=torch.bool, device=k_BLGK.device)
    else:
        in_last_document_B = (documents_BL == documents_BL[:, -1:]).sum(1)
        is_one_document_B = in_last_document_B == length
    keys, values = joined(memory, k_BLGK, v_BLGK)
    if memory is None:
        length_B = in_last_document_B
    else:
        length_B = in_last_document_B + torch.where(is_one_document_B, memory.length_B, 0)
    if keep is None:
        return AttentionMemory(keys, values, length_B)
    missing = max(0, keep - keys.shape[1])
    start = keys.shape[1] + missing - keep
    keys, values = (F.pad(x[:, start:], (0, 0, 0, 0, missing, 0)) for x in (keys, values))
    return AttentionMemory(keys, values, length_B.clamp(max=keep))


class AttentionInputs(NamedTuple):
    """Queries, keys and values of the rows. Window and documents limit the visible keys; the memory adds keys.

    `documents_BL` is None if every row is a single document. `boundaries_E` is the result of
    `document_boundaries(documents_BL)`, or None. If it is None, a kernel that needs the boundaries computes them, and
    the host waits for the device.
    """

    q_BLHK: Tensor
    k_BLGK: Tensor
    v_BLGK: Tensor
    window: int | None = None
    documents_BL: Tensor | None = None
    memory: AttentionMemory | None = None
    boundaries_E: Tensor | None = None


class SeenKeys(NamedTuple):
    """The first and last key that each query sees, as indices into all S keys. The last is the query's own key.

    Along a row, the indices never decrease. The mask function that FlexAttention compiles reads these tensors. If the
    function computed the ranges from Python numbers, it would be compiled again for each new value.
    """

    first_BL: Tensor
    last_L: Tensor


def seen_keys(inputs: AttentionInputs) -> SeenKeys:
    """Compute the range of keys that each query sees, from window, documents and memory."""
    q_BLHK, _, _, window, documents_BL, memory, _ = inputs
    batch, length = q_BLHK.shape[:2]
    before = 0 if memory is None else memory.keys_BMGK.shape[1]
    last_L = torch.arange(before, before + length, device=q_BLHK.device)
    first_BL = torch.full((batch, length), before, device=q_BLHK.device)
    if documents_BL is not None:
        is_start_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0))
        first_BL = torch.where(is_start_BL, last_L, before).cummax(1).values
    if memory is not None:
        first_BL = torch.where(first_BL > before, first_BL, before - memory.length_B[:, None])
    if window is not None:
        first_BL = torch.maximum(first_BL, last_L - window + 1)
    return SeenKeys(first_BL, last_L)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output in the queries' dtype, computed with a full mask (L, S).

    The computation is in fp32 (float64 for float64 inputs).
    """
    q_BLHK = inputs.q_BLHK
    keys = with_memory(inputs)
    visible = visible_keys(keys, 0, keys.keys_BSGK.shape[1], q_BLHK.shape[1], inputs.window)
    share = q_BLHK.shape[2] // inputs.k_BLGK.shape[2]
    k_BSHK, v_BSHK = (at_least_fp32(x).repeat_interleave(share, dim=2) for x in (keys.keys_BSGK, keys.values_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", at_least_fp32(q_BLHK), k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK).to(q_BLHK.dtype)


class AttentionKeys(NamedTuple):
    """All S keys and values (first from the memory, then from the row), and each key's document number.

    `documents_BS` is None if every row is a single document and there is no memory.
    """

    keys_BSGK: Tensor
    values_BSGK: Tensor
    documents_BS: Tensor | None


def with_memory(inputs: AttentionInputs) -> AttentionKeys:
    """Return the keys and values of the memory and the row together.

    The last `length_B` entries of the memory get the document number of the row's first token. Earlier entries get -1,
    so that no query sees them.
    """
    _, k_BLGK, v_BLGK, _, documents_BL, memory, _ = inputs
    if memory is None:
        return AttentionKeys(k_BLGK, v_BLGK, documents_BL)
    if documents_BL is None:
        documents_BL = torch.zeros(k_BLGK.shape[:2], dtype=torch.int64, device=k_BLGK.device)
    back_M = torch.arange(memory.keys_BMGK.shape[1], 0, -1, device=k_BLGK.device)
    memory_documents_BM = torch.where(back_M <= memory.length_B[:, None], documents_BL[:, :1], -1)
    return AttentionKeys(*joined(memory, k_BLGK, v_BLGK), torch.cat((memory_documents_BM, documents_BL), dim=1))


def visible_keys(keys: AttentionKeys, start: int, stop: int, queries: int, window: int | None) -> Tensor:
    """Return a mask for a block of queries and the C keys `start` to `stop` - 1: True where a query sees a key.

    The block's Q = `queries` queries are the last tokens of this range of keys. The mask has the shape (Q, C) if `keys`
    has no documents, else (B, 1, Q, C).
    """
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


def attend_to_rows(inputs: AttentionInputs) -> Tensor:
    """Compute causal attention with torch's scaled_dot_product_attention, for rows that are one document each.

    The window, documents and memory in `inputs` are ignored. So the caller must check that there are no documents and
    no memory, and that a window, if there is one, is at least as long as the row.
    """
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
