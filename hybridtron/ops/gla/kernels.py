"""Launches for gated linear attention's Triton kernels (`kernels_forward`, `kernels_pairs`, `kernels_backward`).

Only the inputs are saved; the backward pass recomputes the scores and the states between chunks. Results are
deterministic. The kernels were checked on an H200 (benchmarks/gpu.md).

The dtype of q, k and v decides how matrices are multiplied. For bf16, both factors are cast to bf16. For fp16, tf32 is
used: it represents fp16 numbers exactly and has the range that states need. For fp32, factors stay fp32. Accumulations
are always fp32.

These names are used for a chunk of T tokens: h (the state before the chunk), dh (the state gradient after the chunk), W
(the product of the chunk's decays), A (the scores of queries with keys), and M (the gradient for A).

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, C chunks, T tokens
per chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla import kernels_backward, kernels_forward, kernels_pairs
from hybridtron.ops.gla.kernels_row import ChunkedKernelRow, ChunkTiles
from hybridtron.ops.gla.reference import GLAInputs
from hybridtron.ops.kernel_launch import ceil_div, power_of_2
from hybridtron.ops.ssd.kernels_row import products_of

# A type checker sees a kernel as a Python function, which can't be launched. `Any` turns this check off.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward
pair_kernels: Any = kernels_pairs

# A program of the kernel `pass_states` keeps some key channels of a state in registers, with all value channels.
ROWS = 16  # maximum number of these key channels
ENTRIES = 4096  # maximum number of state entries in these registers
FP32_WARPS = 4  # warps per program for pairs of tokens in a part; in fp32, one warp would spill registers


def tiles(dtype: torch.dtype) -> ChunkTiles:
    """Return tile sizes for which ptxas spills no registers on an H100.

    Tiles are smaller for fp32, since fp32 matrix multiplications run without tensor cores and need more registers.
    """
    if dtype == torch.float32:
        return ChunkTiles(32, 16, 32, 32)
    return ChunkTiles(64, 16, 32, 64 if dtype == torch.bfloat16 else 32)


def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """Return y and the state after the row. q, k and v are cast to their widest dtype, g and the state to fp32."""
    q_BLHN, k_BLHN, v_BLHP, g_BLHN, state_BHNP, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLHN, k_BLHN, v_BLHP)))
    q, k, v = (t.to(shared) for t in (q_BLHN, k_BLHN, v_BLHP))
    state = None if state_BHNP is None else state_BHNP.float()
    y_BLHP, last_BHNP = _TritonGLA.apply(q, k, v, g_BLHN.float(), state, document_starts(documents_BL))
    return y_BLHP.to(v_BLHP.dtype), last_BHNP


class _TritonGLA(torch.autograd.Function):
    """Autograd function around all kernels. It saves only the inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        contiguous: list[Any] = [t if t is None else t.contiguous() for t in fields]
        row = GLAKernelRow(*contiguous)
        ctx.save_for_backward(*row)
        before_BCHNP, _, last_BHNP = row.states_before()
        return row.outputs(row.scores(), before_BCHNP), last_BHNP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHNP: Tensor) -> tuple[Tensor | None, ...]:
        row = GLAKernelRow(*ctx.saved_tensors)
        dy_BLHP = grad_y_BLHP.contiguous()
        before_BCHNP, whole_BCHN, _ = row.states_before()
        after_BCHNP, through_BCHN, grad_state = row.gradients_after(
            dy_BLHP, before_BCHNP, whole_BCHN, grad_last_BHNP.contiguous()
        )
        grad_v = row.value_gradients(row.scores(), dy_BLHP, after_BCHNP)
        weights_BHLT = row.pair_weights(dy_BLHP)
        pairs = weights_BHLT, *row.pair_gradients(weights_BHLT)
        q, k, g = row.token_gradients(dy_BLHP, before_BCHNP, after_BCHNP, through_BCHN, pairs)
        return q, k, grad_v, g, None if row.state_BHNP is None else grad_state, None


class GLAKernelRow(ChunkedKernelRow, GLAInputs):
    """The op's inputs, contiguous, with a method for each kernel launch."""

    @property
    def tiles(self) -> ChunkTiles:
        return tiles(self.v_BLHP.dtype)

    @property
    def state_grid(self) -> tuple[int, int, int]:
        """Grid for `pass_states`: (key slices, heads, rows)."""
        rows, _, heads, keys = self.k_BLHN.shape
        return ceil_div(keys, self._state_blocks["ROWS"]), heads, rows

    @property
    def decays(self) -> tuple[Tensor, Tensor]:
        """Log decays, and a mask for tokens that begin a document.

        The field `documents_BL` has this mask, not document numbers. Without documents, no kernel reads the mask, and g
        is passed in its place.
        """
        return self.g_BLHN, self.g_BLHN if self.documents_BL is None else self.documents_BL

    @property
    def blocks(self) -> dict[str, int]:
        """Kernel constants for sizes along a head's channels, as {name: size}.

        BLOCK_N, BLOCK_P: numbers of key channels and value channels, padded to full slices
        KEYS, VALUES: key channels and value channels per slice
        """
        sizes = self.k_BLHN.shape[3], self.v_BLHP.shape[3]
        slices = self.tiles.keys, self.tiles.values
        keys, values = (min(most, max(16, power_of_2(size))) for size, most in zip(sizes, slices, strict=True))
        blocks = {"BLOCK_N": ceil_div(sizes[0], keys) * keys, "BLOCK_P": ceil_div(sizes[1], values) * values}
        return blocks | {"KEYS": keys, "VALUES": values}

    @property
    def _state_blocks(self) -> dict[str, int]:
        """Kernel constants for `pass_states`: a program computes ROWS key channels, with all value channels."""
        keys = self.k_BLHN.shape[3]
        values = self.v_BLHP.shape[3]
        block = power_of_2(values)
        return {"N": keys, "P": values, "ROWS": min(ROWS, ENTRIES // block), "BLOCK_P": block}

    def constants(self, *names: str) -> dict[str, Any]:
        """Return a kernel's constants and compiler options.

        The result has the constants that `names` lists, and in addition CHUNK, PRODUCT, PRECISION, `num_warps` and
        `num_stages`.
        """
        return self.named(names, {}) | products_of(self.v_BLHP.dtype)

    def empty(self, *sizes: int) -> Tensor:
        """Return an uninitialized fp32 tensor (B, *sizes)."""
        return self.g_BLHN.new_empty(len(self.g_BLHN), *sizes)

    def states_before(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state before each chunk, W for each chunk, and the state after the row."""
        heads, keys, values = *self.k_BLHN.shape[2:], self.v_BLHP.shape[3]
        states_BCHNP = self.empty(self.chunks, heads, keys, values)
        whole_BCHN = self.empty(self.chunks, heads, keys)
        last_BHNP = self.empty(heads, keys, values)
        self._added(self.k_BLHN, self.v_BLHP, states_BCHNP, whole_BCHN, reverse=False)
        start = last_BHNP if self.state_BHNP is None else self.state_BHNP
        forward_kernels.pass_states[self.state_grid](
            states_BCHNP, whole_BCHN, start, last_BHNP, states_BCHNP, whole_BCHN, self.chunks, heads,
            START=self.state_BHNP is not None, REVERSED=False, **self._state_blocks,
        )  # fmt: skip
        return states_BCHNP, whole_BCHN, last_BHNP

    def gradients_after(
        self, dy_BLHP: Tensor, before_BCHNP: Tensor, whole_BCHN: Tensor, grad_last_BHNP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh and W sum_p h dh for each chunk (p: value channels), and the state gradient before the row.

        The recurrence over state gradients, from the last chunk to the first, computes all three.
        """
        states_BCHNP = torch.empty_like(before_BCHNP)
        through_BCHN = torch.empty_like(whole_BCHN)
        grad_state_BHNP = torch.empty_like(grad_last_BHNP)
        self._added(self.q_BLHN, dy_BLHP, states_BCHNP, whole_BCHN, reverse=True)
        forward_kernels.pass_states[self.state_grid](
            states_BCHNP, whole_BCHN, grad_last_BHNP, grad_state_BHNP, before_BCHNP, through_BCHN, self.chunks,
            self.lengths[1], START=True, REVERSED=True, **self._state_blocks,
        )  # fmt: skip
        return states_BCHNP, through_BCHN, grad_state_BHNP

    def _added(self, left: Tensor, right: Tensor, states: Tensor, whole: Tensor, reverse: bool) -> None:
        """Store each chunk's addition to the state in `states`, and each chunk's W in `whole`.

        With `reverse`, store each chunk's addition to the state gradient, and leave `whole` unchanged.
        """
        forward_kernels.chunk_states[self.grid(1, math.prod(self.slices))](
            left, right, *self.decays, states, whole, *self.lengths, REVERSED=reverse,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip

    def scores(self) -> Tensor:
        """Return A (B, H, L, T)."""
        length, heads = self.lengths
        scores_BHLT = self.empty(heads, length, self.tiles.chunk)
        for sizes in self._block_sizes():
            pair_kernels.scores[self.grid(self.tiles.chunk // sizes["TILE"], 1)](
                self.q_BLHN, self.k_BLHN, *self.decays, scores_BHLT, length, heads,
                **self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS") | sizes,
            )  # fmt: skip
        return scores_BHLT

    def _block_sizes(self) -> Iterator[dict[str, int]]:
        """Yield the constants for the two launches of `kernels_pairs`: blocks within a part, then larger blocks."""
        halvings = self.tiles.part.bit_length() - 1
        of_chunk = self.tiles.chunk.bit_length() - 1
        warps = FP32_WARPS if self.v_BLHP.dtype == torch.float32 else 1
        yield {"TILE": self.tiles.part, "FIRST": 0, "END": halvings, "num_warps": warps}
        yield {"TILE": self.tiles.chunk, "FIRST": halvings, "END": of_chunk}

    def outputs(self, scores_BHLT: Tensor, before_BCHNP: Tensor) -> Tensor:
        """Return y."""
        y_BLHP = torch.empty_like(self.v_BLHP)
        forward_kernels.outputs[self.grid(1, self.slices[1])](
            scores_BHLT, self.q_BLHN, *self.decays, self.v_BLHP, before_BCHNP, y_BLHP, *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip
        return y_BLHP

    def value_gradients(self, scores_BHLT: Tensor, dy_BLHP: Tensor, after_BCHNP: Tensor) -> Tensor:
        """Return dv."""
        grad_v_BLHP = torch.empty_like(self.v_BLHP)
        backward_kernels.value_gradients[self.grid(1, self.slices[1])](
            scores_BHLT, self.k_BLHN, *self.decays, dy_BLHP, after_BCHNP, grad_v_BLHP, *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip
        return grad_v_BLHP

    def pair_weights(self, dy_BLHP: Tensor) -> Tensor:
        """Return M (B, H, L, T)."""
        length, heads = self.lengths
        weights_BHLT = self.empty(heads, length, self.tiles.chunk)
        backward_kernels.pair_weights[self.grid(1, 1)](
            dy_BLHP, self.v_BLHP, weights_BHLT, length, heads, **self.constants("P", "BLOCK_P", "VALUES")
        )
        return weights_BHLT

    def pair_gradients(self, weights_BHLT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms in dq and dk that come from scores between two different tokens, in fp32."""
        grads = torch.empty_like(self.g_BLHN), torch.empty_like(self.g_BLHN)
        for sizes in self._block_sizes():
            pair_kernels.pairs[self.grid(self.tiles.chunk // sizes["TILE"], self.slices[0])](
                self.q_BLHN, self.k_BLHN, *self.decays, weights_BHLT, *grads, *self.lengths,
                **self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS") | sizes,
            )  # fmt: skip
        return grads

    def token_gradients(
        self, dy: Tensor, before: Tensor, after: Tensor, through: Tensor, pairs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dg."""
        grads = tuple(map(torch.empty_like, (self.q_BLHN, self.k_BLHN, self.g_BLHN)))
        backward_kernels.token_gradients[self.grid(1, self.slices[0])](
            self.q_BLHN, self.k_BLHN, self.v_BLHP, *self.decays, dy, before, after, through, *pairs, *grads,
            *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip
        return grads
