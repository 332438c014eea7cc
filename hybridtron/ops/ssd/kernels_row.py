"""SSD's inputs in the form that the Triton kernels read, and the kernels' tile sizes.

The dtype of x, B and C decides the precision of matrix multiplications. For bf16, both factors are cast to bf16. For
fp16, tf32 is used, which represents fp16 numbers exactly and has the range that states need. For fp32, factors stay
fp32. States and accumulation are always fp32.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G head groups that share B and C, N state
size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hybridtron.ops.kernel_launch import PROCESSORS, ceil_div, heads_side_by_side, last_side_by_side, power_of_2

MAX_STRIDE = 2**23  # maximum elements between tokens, since offsets inside a chunk (up to 128 tokens) are int32
MIN_WALK = 32  # minimum entries along N that a program of `walk` computes


@functools.cache
def products_of(dtype: torch.dtype) -> dict[str, Any]:
    """Return two kernel constants for this dtype: PRODUCT and PRECISION.

    PRODUCT is the dtype to which the factors of a matrix multiplication are cast. PRECISION is `input_precision` of
    tl.dot.
    """
    chosen = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float32, "tf32")}
    product, precision = chosen.get(dtype, (tl.float32, "ieee"))
    return {"PRODUCT": product, "PRECISION": precision}


@dataclass(frozen=True)
class ProductTiles:
    """Tile sizes for the kernels with matrix multiplications, and two compiler options.

    chunk    tokens per chunk; the longer the chunks, the fewer states are in memory
    tokens   tokens in a chunk that a program computes
    inner    entries of the axis N that `token_gradients` loads at a time
    outer    entries of the axis N that a program computes if its result has the axis N
    warps    warps per program of `group_gradients`
    stages   pipeline stages of the loop over heads in `group_gradients`
    light    warps per program of the other kernels; with 4 warps, two or more programs share a multiprocessor
    narrow   like `inner`, for `outputs` and `group_scores`
    ahead    pipeline stages of the loops over chunks in `walk`, and over tokens in `outputs`
    """

    chunk: int
    tokens: int
    inner: int
    outer: int
    warps: int = 8
    stages: int = 1
    light: int = 8
    narrow: int = 32
    ahead: int = 1


@functools.cache
def tiles(dtype: torch.dtype, head: int, state: int) -> ProductTiles:
    """Return tile sizes for which ptxas spills almost no registers on an H100.

    `head` is P and `state` is N. Tiles are small for fp32, since fp32 multiplications run without tensor cores. Chunks
    of 256 tokens would halve the states in memory, but `walk` and `group_gradients` then spill registers, and their
    modelled times are 1.7 and 3.4 times as long (benchmarks/step_model.md).
    """
    if dtype == torch.bfloat16 and head <= 64 and state <= 128:
        return ProductTiles(128, tokens=64, inner=128, outer=128, stages=2, light=4, narrow=64, ahead=2)
    if dtype == torch.bfloat16:
        return ProductTiles(64, tokens=64, inner=64, outer=64, stages=2, narrow=64)
    if dtype == torch.float16 and head <= 64:
        return ProductTiles(64, tokens=64, inner=32, outer=64)
    return ProductTiles(32, tokens=16, inner=32, outer=64 if head <= 64 else 32, stages=2)


class SSDRow(NamedTuple):
    """Inputs to `ssd_scan` or `decay_scan` under the names of `ssd_scan`, in the layouts that the kernels read.

    x, B, C and dt may have any strides over rows and tokens. All other tensors are contiguous.

    For `decay_scan`, x, B and C hold v, k and q, dt holds the log decays, and A and dt_bias are None. `step` is the
    factor by which later tokens see a token, and `own_step` is the factor by which a token sees itself. Either both are
    given or both are None.
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

    def readable(self) -> SSDRow:
        """Return the row; tensors whose layout the kernels can't read are copied."""
        return SSDRow(
            readable_tokens(self.x_BLHP),
            last_side_by_side(self.dt_BLH),
            _contiguous(self.A_H),
            readable_tokens(self.B_BLGN),
            readable_tokens(self.C_BLGN),
            self.D_H.contiguous(),
            *map(_contiguous, self[6:]),
        )

    @property
    def has_log_decays(self) -> bool:
        """True if dt holds log decays."""
        return self.A_H is None

    @property
    def itself(self) -> bool:
        """True if `step` and `own_step` are given."""
        return self.own_step_BLH is not None

    @property
    def grouped(self) -> bool:
        """True if heads share B and C."""
        _, heads, groups = self.lengths()
        return heads > groups

    @property
    def rates(self) -> tuple[Tensor, Tensor]:
        """dt_bias and A. With log decays, dt replaces both, as a valid pointer that no kernel reads."""
        return (self.dt_BLH, self.dt_BLH) if self.A_H is None or self.dt_bias_H is None else (self.dt_bias_H, self.A_H)

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """`step` and `own_step`. If they are None, D replaces them, as a valid pointer that no kernel reads."""
        if self.step_BLH is None or self.own_step_BLH is None:
            return self.D_H, self.D_H
        return self.step_BLH, self.own_step_BLH

    @property
    def tiles(self) -> ProductTiles:
        return tiles(self.x_BLHP.dtype, self.x_BLHP.shape[3], self.B_BLGN.shape[3])

    @property
    def chunks(self) -> int:
        """Number of chunks in a row."""
        return ceil_div(self.x_BLHP.shape[1], self.tiles.chunk)

    @property
    def documents(self) -> Tensor:
        """Document numbers. If they are None, dt replaces them, as a valid pointer that no kernel reads."""
        return self.dt_BLH if self.documents_BL is None else self.documents_BL

    def grid(self, per_chunk: int, programs: int) -> tuple[int, int, int]:
        """Return the grid (chunks * `per_chunk`, `programs`, rows)."""
        return self.chunks * per_chunk, programs, self.x_BLHP.shape[0]

    def lengths(self) -> tuple[int, int, int]:
        """Return L, H and G."""
        return self.x_BLHP.shape[1], self.x_BLHP.shape[2], self.B_BLGN.shape[2]

    def constants(self) -> dict[str, Any]:
        """Return the constants of all kernels with matrix multiplications: sizes, tile sizes, precision and warps."""
        head = self.x_BLHP.shape[3]
        state = self.B_BLGN.shape[3]
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
        """Entries along N that `token_gradients` loads at a time.

        If every head has its own B and C, wider slices than those of `outputs` would spill registers.
        """
        widest = self.tiles.inner if self.grouped else self.tiles.narrow
        return min(widest, _block(self.B_BLGN.shape[3]))

    @property
    def narrow(self) -> int:
        """Entries along N that `outputs` and `group_scores` load at a time."""
        return min(self.tiles.narrow, _block(self.B_BLGN.shape[3]))

    @property
    def outer(self) -> int:
        """Entries along N that a program computes if its result has the axis N."""
        return min(self.tiles.outer, _block(self.B_BLGN.shape[3]))

    @property
    def slices(self) -> int:
        """Number of programs among which a result's axis N is divided."""
        return _block(self.B_BLGN.shape[3]) // self.outer

    def walk_slices(self) -> tuple[int, int]:
        """Return the entries along N that a program of `walk` computes, and the number of such slices of a state.

        `walk` has a program for each row, head and slice. Slices are narrower if a few rows and heads would leave
        multiprocessors of an H100 idle. The number of slices decides in which order `through` is added.
        """
        entries = self.outer
        whole = _block(self.B_BLGN.shape[3])
        rows, _, heads, _ = self.x_BLHP.shape
        while entries > MIN_WALK and rows * heads * (whole // entries) < PROCESSORS:
            entries //= 2
        return entries, whole // entries

    def per_token(self) -> Tensor:
        """Return an uninitialized fp32 tensor with an entry for each token and head (B, H, L)."""
        rows, length, heads, _ = self.x_BLHP.shape
        return self.x_BLHP.new_empty(rows, heads, length, dtype=torch.float32)

    def states(self) -> Tensor:
        """Return an uninitialized tensor with a state for every chunk (B, chunks, H, P, N).

        Its dtype is PRODUCT (`products_of`), since the states are factors of matrix multiplications.
        """
        rows, _, heads, head = self.x_BLHP.shape
        shape = rows, self.chunks, heads, head, self.B_BLGN.shape[3]
        return self.x_BLHP.new_empty(shape, dtype=self.product)

    @property
    def product(self) -> torch.dtype:
        """The dtype to which the factors of a matrix multiplication are cast."""
        return torch.bfloat16 if self.x_BLHP.dtype == torch.bfloat16 else torch.float32


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides over rows and over tokens, for each tensor."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def readable_tokens(tensor: Tensor) -> Tensor:
    """Return a tensor (B, L, H, P) itself if the kernels can read it, else a contiguous copy."""
    return heads_side_by_side(tensor) if tensor.stride(1) <= MAX_STRIDE else tensor.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _block(size: int) -> int:
    """Return the smallest tile size for tl.dot that covers `size`: a power of two, at least 16."""
    return max(16, power_of_2(size))
