"""Causal attention by C++ compiled for this CPU (`native/attention.h`), with windows, documents and remembered keys.

Legend: B rows (sequences in the batch), L tokens per row, H query heads, G key/value heads, K channels per head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtron.ops.attention.reference import AttentionInputs, joined, seen_keys
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.attention import AttentionPlan, attend, whole_rows
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.tensors import unsupported_types


def _unsupported_reason(inputs: AttentionInputs) -> str | None:
    return unsupported_types(*inputs[:3])


@untraced  # torch.compile can't trace a function in C++
def attention(inputs: AttentionInputs) -> Tensor:
    q_BLHK, k_BLGK, v_BLGK, window, documents_BL, memory, _ = inputs
    rows, length = q_BLHK.shape[:2]
    if documents_BL is None and memory is None:
        first_BL = _first_of_sizes(rows, length, window)
    else:
        first_BL = seen_keys(inputs).first_BL.contiguous()
    return attend(q_BLHK, *joined(memory, k_BLGK, v_BLGK), AttentionPlan(*whole_rows(rows, length), first_BL))


@functools.lru_cache(maxsize=16)
def _first_of_sizes(rows: int, length: int, window: int | None) -> Tensor:
    """Return each query's first visible key (B, L) as an index, for rows with neither documents nor memory."""
    last_L = torch.arange(length)
    if window is None:
        first_L = torch.zeros_like(last_L)
    else:
        first_L = (last_L - window + 1).clamp(min=0)
    return first_L.repeat(rows, 1)


NATIVE = Implementation("native", attention, "cpu", unsupported_reason=_unsupported_reason, missing=missing)
