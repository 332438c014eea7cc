"""Causal softmax attention: full or in a sliding window, with grouped keys, documents and remembered keys.

    y_i = sum_j a_ij v_j,   a_i = softmax over the visible j of  q_i . k_j / sqrt(K)

Token i sees j <= i, in a window of w only itself and the w - 1 tokens before it, and only its own document. Remembered
keys count as the tokens just before the row, in the row's first document. Positions are not applied here: queries and
keys arrive rotated. No dropout, no bias, no attention to the future.

Legend: B rows, L tokens, H query heads, G key/value heads (query head h reads h // (H // G)), K head size, M remembered
tokens, S = M + L keys in all, Q some of the queries, C the range of keys that they can reach.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class AttentionMemory(NamedTuple):
    """Keys (rotated) and values of tokens before a row; in row b the last length_B[b] of M entries count."""

    keys_BMGK: Tensor
    values_BMGK: Tensor
    length_B: Tensor


def joined(memory: AttentionMemory | None, k_BLGK: Tensor, v_BLGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with the remembered ones before them."""
    if memory is None:
        return k_BLGK, v_BLGK
    return torch.cat((memory.keys_BMGK, k_BLGK), dim=1), torch.cat((memory.values_BMGK, v_BLGK), dim=1)


def remember(
    memory: AttentionMemory | None, k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, keep: int | None
) -> AttentionMemory:
    """Return the memory after a row: the last `keep` tokens, or all of them if None.

    With `keep` the shape is the same after every row, padded with zeros in front; without it M grows by L. Tokens of
    earlier documents than the row's last do not count in `length_B`.
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
    """Queries, keys and values of a row, with the limits on the keys that a query sees.

    Documents count up along a row; None means a single document. `boundaries_E` comes from `document_boundaries`; if it
    is given, a kernel that needs it does not wait for the device.
    """

    q_BLHK: Tensor
    k_BLGK: Tensor
    v_BLGK: Tensor
    window: int | None = None
    documents_BL: Tensor | None = None
    memory: AttentionMemory | None = None
    boundaries_E: Tensor | None = None


class SeenKeys(NamedTuple):
    """The first and last key that each query sees, as indices into all keys; the last is the query's own.

    Both only grow along a row. They are tensors because a mask must not capture numbers that change between calls.
    """

    first_BL: Tensor
    last_L: Tensor


def seen_keys(inputs: AttentionInputs) -> SeenKeys:
    """Return the range of keys that each query sees, given window, documents and memory."""
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
    """Compute attention with a dense mask, and the softmax in at least fp32."""
    q_BLHK = inputs.q_BLHK
    keys = with_memory(inputs)
    visible = visible_keys(keys, 0, keys.keys_BSGK.shape[1], q_BLHK.shape[1], inputs.window)
    share = q_BLHK.shape[2] // inputs.k_BLGK.shape[2]
    k_BSHK, v_BSHK = (at_least_fp32(x).repeat_interleave(share, dim=2) for x in (keys.keys_BSGK, keys.values_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", at_least_fp32(q_BLHK), k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK).to(q_BLHK.dtype)


class AttentionKeys(NamedTuple):
    """Keys and values, the memory's before the row's, and their documents (None: all are one)."""

    keys_BSGK: Tensor
    values_BSGK: Tensor
    documents_BS: Tensor | None


def with_memory(inputs: AttentionInputs) -> AttentionKeys:
    """Put the memory before the row; its padding gets a document of its own (-1), which no query sees."""
    _, k_BLGK, v_BLGK, _, documents_BL, memory, _ = inputs
    if memory is None:
        return AttentionKeys(k_BLGK, v_BLGK, documents_BL)
    if documents_BL is None:
        documents_BL = torch.zeros(k_BLGK.shape[:2], dtype=torch.int64, device=k_BLGK.device)
    back_M = torch.arange(memory.keys_BMGK.shape[1], 0, -1, device=k_BLGK.device)
    memory_documents_BM = torch.where(back_M <= memory.length_B[:, None], documents_BL[:, :1], -1)
    return AttentionKeys(*joined(memory, k_BLGK, v_BLGK), torch.cat((memory_documents_BM, documents_BL), dim=1))


def visible_keys(keys: AttentionKeys, start: int, stop: int, queries: int, window: int | None) -> Tensor:
    """Return a mask: True for each key of start:stop that each of the last `queries` tokens among them sees.

    Its shape is (Q, C) without documents, and (B, 1, Q, C) with them.
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
    """Run torch's own attention, causal over full rows: without window, documents and memory."""
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
