"""The inputs of SSD as the Triton kernels read them, and in what sizes they are cut.

A product's factors are rounded to the type of x, B and C where that is bf16, summed in fp32; fp16 goes through tf32,
which holds it exactly and a state's range too; fp32 stays fp32. States and sums are fp32.

Legend: as in `reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div, power_of_2


def products_of(dtype: torch.dtype) -> dict[str, Any]:
    """The type that factors are rounded to, and how fp32 factors are multiplied, for what has this type."""
    chosen = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float32, "tf32")}
    product, precision = chosen.get(dtype, (tl.float32, "ieee"))
    return {"PRODUCT": product, "PRECISION": precision}


@dataclass(frozen=True)
class ProductTiles:
    """How the kernels with matrix products are cut, the warps of their programs, and stages of the loop over heads.

    Tokens of a chunk and of a program; state entries that a sum of products takes at a time, and that a program's
    result holds. Long chunks mean few states in memory.
    """

    chunk: int
    own: int
    inner: int
    outer: int
    warps: int = 8
    stages: int = 1


def tiles(dtype: torch.dtype, head: int, state: int) -> ProductTiles:
    """Chosen so that ptxas spills next to no registers for an H100; fp32's products run without tensor cores."""
    if dtype == torch.bfloat16 and head <= 64 and state <= 128:
        return ProductTiles(128, own=64, inner=64, outer=128, stages=2)
    if dtype == torch.bfloat16:
        return ProductTiles(64, own=64, inner=64, outer=64, stages=2)
    if dtype == torch.float16 and head <= 64:
        return ProductTiles(64, own=64, inner=32, outer=64)
    return ProductTiles(32, own=16, inner=32, outer=64, stages=2)


class SSDRow(NamedTuple):
    """The inputs of either op in the scan's words, contiguous; documents are counted from 0.

    Without A and dt_bias, dt are log decays, and x comes with both steps or neither.
    """

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor | None
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor
    dt_bias_H: Tensor | None
    state_BHPN: Tensor | None
    documents_BL: Tensor | None
    step_BLH: Tensor | None
    own_step_BLH: Tensor | None

    @property
    def given(self) -> bool:
        """True where log decays are in the place of dt."""
        return self.A_H is None

    @property
    def itself(self) -> bool:
        """True where a token sees itself by another step than later tokens see it."""
        return self.own_step_BLH is not None

    @property
    def rates(self) -> tuple[Tensor, Tensor]:
        """dt_bias and A, or something to point at."""
        return (self.dt_BLH, self.dt_BLH) if self.A_H is None or self.dt_bias_H is None else (self.dt_bias_H, self.A_H)

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """Both steps, or something small to point at."""
        if self.step_BLH is None or self.own_step_BLH is None:
            return self.D_H, self.D_H
        return self.step_BLH, self.own_step_BLH

    @property
    def tiles(self) -> ProductTiles:
        return tiles(self.x_BLHP.dtype, self.x_BLHP.shape[3], self.B_BLGN.shape[3])

    @property
    def chunks(self) -> int:
        return ceil_div(self.x_BLHP.shape[1], self.tiles.chunk)

    @property
    def documents(self) -> Tensor:
        """Something to point at; DOCUMENTS says whether it holds documents."""
        return self.dt_BLH if self.documents_BL is None else self.documents_BL

    def grid(self, per_chunk: int, programs: int) -> tuple[int, int, int]:
        return self.chunks * per_chunk, programs, self.x_BLHP.shape[0]

    def lengths(self) -> tuple[int, int, int]:
        """L, H, G."""
        return self.x_BLHP.shape[1], self.x_BLHP.shape[2], self.B_BLGN.shape[2]

    def constants(self) -> dict[str, Any]:
        """Sizes of tiles and the type of products, for kernels with matrix products."""
        head, state = self.x_BLHP.shape[3], self.B_BLGN.shape[3]
        return {
            "P": head,
            "N": state,
            "CHUNK": self.tiles.chunk,
            "BLOCK_P": _block(head),
            "BLOCK_N": _block(state),
            "num_warps": self.tiles.warps,
        } | products_of(self.x_BLHP.dtype)

    @property
    def inner(self) -> int:
        """State entries that a sum of products takes at a time."""
        return min(self.tiles.inner, _block(self.B_BLGN.shape[3]))

    @property
    def outer(self) -> int:
        """State entries that a program's result holds."""
        return min(self.tiles.outer, _block(self.B_BLGN.shape[3]))

    @property
    def slices(self) -> int:
        """Programs among which the state entries of a result are divided."""
        return _block(self.B_BLGN.shape[3]) // self.outer

    def per_token(self) -> Tensor:
        """An empty tensor with a number for each token and head (B, H, L)."""
        rows, length, heads, _ = self.x_BLHP.shape
        return self.x_BLHP.new_empty(rows, heads, length, dtype=torch.float32)

    def states(self) -> Tensor:
        """An empty state for every chunk (B, chunks, H, P, N)."""
        rows, _, heads, head = self.x_BLHP.shape
        shape = rows, self.chunks, heads, head, self.B_BLGN.shape[3]
        return self.x_BLHP.new_empty(shape, dtype=torch.float32)


def _block(size: int) -> int:
    """What a matrix product takes for a size: a power of two, from 16 on."""
    return max(16, power_of_2(size))
