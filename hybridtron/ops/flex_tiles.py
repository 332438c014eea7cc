"""Builds a block mask for FlexAttention from maps of tiles, and calls FlexAttention's kernel with the mask.

A tile is 128 queries by 128 keys. The block mask lists the tiles that the kernel computes; the kernel skips all other
tiles. The sizes of the mask's tensors depend only on B, L and S, so batches with different documents run the same
kernel, and the host never reads the mask.

torch.compile makes the kernels, at most eight for one code object. For further sizes FlexAttention then runs without a
kernel, and stores all L x S scores. So each kernel here is compiled from its own copy of the code.

Legend: B rows (sequences in a batch), L queries, S keys, H query heads, G key/value heads, K head size, T query tiles,
U key tiles.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

LOG = logging.getLogger(__name__)
TILE = 128
SMALLEST_HEAD = 16


def flex_unsupported_reason(q_BLHK: Tensor) -> str | None:
    """Return the reason why FlexAttention cannot take these queries, or None."""
    if q_BLHK.dtype == torch.float64:
        return "does not support float64"
    size = q_BLHK.shape[-1]
    if size < SMALLEST_HEAD:
        return f"supports heads of at least {SMALLEST_HEAD} channels, not {size}"
    return None


def mask_of_tiles(
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    lengths: tuple[int, int],
    tiles_BHTU: Tensor,
    full_BHTU: Tensor | None = None,
) -> BlockMask:
    """Build a block mask from boolean tile maps (B, H, T, U).

    In tiles that the first map marks, `sees(row, head, query, key)` decides whether a query sees a key. In tiles that
    the optional second map marks, every query sees every key. `lengths` is (L, S).
    """
    counts_BHT, order_BHTU = _listed(tiles_BHTU)
    full_counts_BHT, full_order_BHTU = (None, None) if full_BHTU is None else _listed(full_BHTU)
    return BlockMask.from_kv_blocks(
        counts_BHT,
        order_BHTU,
        full_counts_BHT,
        full_order_BHTU,
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=lengths,
    )


def _listed(tiles_BHTU: Tensor) -> tuple[Tensor, Tensor]:
    """For each query tile, return the number of marked key tiles, and the indices of all key tiles, marked first."""
    first_to_last = tiles_BHTU.int().argsort(dim=-1, descending=True, stable=True)
    return tiles_BHTU.sum(-1, dtype=torch.int32), first_to_last.int()


class KernelSizes(NamedTuple):
    """Sizes that a kernel is compiled for.

    rule: module of the mask's function
    heads: H, G and K
    lengths: B, L and S; None if the kernel takes any lengths
    kind: dtype, whether B is 1, whether L fits into a tile, and whether S does; torch compiles a kernel for each kind
    """

    rule: str
    heads: tuple[int, int, int]
    lengths: tuple[int, int, int] | None
    kind: tuple[torch.dtype, bool, bool, bool]


def attend_to_tiles(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: BlockMask, window: int | None = None, repeats: bool = False
) -> Tensor:
    """Return the attention output (B, L, H, K) under a block mask.

    With `repeats`, a kernel is compiled for these sizes alone, and is faster than a kernel for any sizes. Set `repeats`
    only if a run has few different sizes. The tensors that the mask's function reads must also have few sizes.

    The result does not depend on `window`. A rehearsal on a simulated GPU reads `window` (None: no limit) to estimate
    the work. On a CPU FlexAttention has no backward pass; tests run its forward pass there.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    attend: Callable[..., Tensor] = _attended
    if _needs_kernel(q):
        lengths = None
        if repeats:
            lengths = (q.shape[0], q.shape[2], k.shape[2])
        heads = (q.shape[1], k.shape[1], q.shape[3])
        kind = (q.dtype, q.shape[0] == 1, q.shape[2] <= TILE, k.shape[2] <= TILE)
        attend = _kernel(window, KernelSizes(mask.mask_mod.__module__, heads, lengths, kind))
    return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _needs_kernel(q: Tensor) -> bool:
    """Return True on CUDA. When torch.compile traces the caller, it compiles FlexAttention with the code around it."""
    return q.is_cuda and not torch.compiler.is_compiling()


def _kernel(window: int | None, sizes: KernelSizes) -> Callable[..., Tensor]:
    """Return FlexAttention compiled to one kernel; without compilation it would store all L x S scores.

    `window` has no effect here. A rehearsal on a simulated GPU replaces this function by a function that reads `window`
    to count the work.
    """
    return _compiled(sizes)


@functools.cache
def _compiled(sizes: KernelSizes) -> Callable[..., Tensor]:
    """Compile a copy of FlexAttention's function for these sizes.

    If torch can't make a kernel for fixed sizes, its error is raised. If it can't make a kernel for any sizes, a
    warning is logged, and FlexAttention runs without a kernel.
    """
    function = types.FunctionType(_attended.__code__.replace(), _attended.__globals__)
    fixed = sizes.lengths is not None
    return torch.compile(function, dynamic=not fixed, fullgraph=fixed)


def _attended(q_BHLK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    if q_BHLK.is_cuda and not torch.compiler.is_compiling():
        _warn_of_no_kernel()
    return flex_attention(q_BHLK, k_BGSK, v_BGSK, block_mask=block_mask, enable_gqa=enable_gqa)


@functools.cache
def _warn_of_no_kernel() -> None:
    """Warn once that FlexAttention runs without a kernel; torch reports this only in its own log."""
    LOG.warning("FlexAttention runs without a kernel and stores all L x S scores: torch.compile has too many kernels")
