"""The launches of the Triton kernels of gated linear attention (`kernels_forward`, `kernels_backward`).

Backward keeps the inputs alone and computes scores and the states between chunks again. A product's factors are
rounded to the type of q, k and v where that is bf16, summed in fp32; fp16 goes through tf32, which holds it exactly and
a state's range too; fp32 stays fp32. The same call gives the same bits again. Right on an H200 (benchmarks/gpu.md).

Legend: as in `kernels_forward`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla import kernels_backward, kernels_forward
from hybridtron.ops.gla.kernels_row import ChunkedKernelRow, ChunkTiles
from hybridtron.ops.gla.reference import GLAInputs
from hybridtron.ops.kernel_launch import ceil_div, power_of_2
from hybridtron.ops.ssd.kernels_row import products_of

# To a type checker a kernel is the Python function that it is written as, which can't be launched.
forward_kernels: Any = kernels_forward
backward_kernels: Any = kernels_backward

ROWS, ENTRIES = 16, 4096  # of a state that one program carries through the row, at most


def tiles(dtype: torch.dtype) -> ChunkTiles:
    """Chosen so that ptxas spills no registers for an H100; fp32's products run without tensor cores."""
    if dtype == torch.float32:
        return ChunkTiles(32, 16, 32, 32)
    return ChunkTiles(64, 16, 32, 64 if dtype == torch.bfloat16 else 32)


def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    """q, k and v in one type, the widest of theirs; decays and states in fp32."""
    q_BLHN, k_BLHN, v_BLHP, g_BLHN, state_BHNP, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLHN, k_BLHN, v_BLHP)))
    q, k, v = (t.to(shared) for t in (q_BLHN, k_BLHN, v_BLHP))
    state = None if state_BHNP is None else state_BHNP.float()
    y_BLHP, last_BHNP = _TritonGLA.apply(q, k, v, g_BLHN.float(), state, document_starts(documents_BL))
    return y_BLHP.to(v_BLHP.dtype), last_BHNP


class _TritonGLA(torch.autograd.Function):
    """Keeps its inputs."""

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
        row, dy_BLHP = GLAKernelRow(*ctx.saved_tensors), grad_y_BLHP.contiguous()
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
    """The launches of one row."""

    @property
    def tiles(self) -> ChunkTiles:
        return tiles(self.v_BLHP.dtype)

    @property
    def state_grid(self) -> tuple[int, int, int]:
        rows, _, heads, keys = self.k_BLHN.shape
        return ceil_div(keys, self._state_blocks["ROWS"]), heads, rows

    @property
    def decays(self) -> tuple[Tensor, Tensor]:
        """Log decays and starts; without documents something to point at."""
        return self.g_BLHN, self.g_BLHN if self.documents_BL is None else self.documents_BL

    @property
    def blocks(self) -> dict[str, int]:
        sizes = self.k_BLHN.shape[3], self.v_BLHP.shape[3]
        slices = self.tiles.keys, self.tiles.values
        keys, values = (min(most, max(16, power_of_2(size))) for size, most in zip(sizes, slices, strict=True))
        blocks = {"BLOCK_N": ceil_div(sizes[0], keys) * keys, "BLOCK_P": ceil_div(sizes[1], values) * values}
        return blocks | {"KEYS": keys, "VALUES": values}

    @property
    def _state_blocks(self) -> dict[str, int]:
        keys, values = self.k_BLHN.shape[3], self.v_BLHP.shape[3]
        block = power_of_2(values)
        return {"N": keys, "P": values, "ROWS": min(ROWS, ENTRIES // block), "BLOCK_P": block}

    def constants(self, *names: str) -> dict[str, Any]:
        """Sizes of tiles and the type of products, and of others those that are named."""
        return self.named(names, {}) | products_of(self.v_BLHP.dtype)

    def empty(self, *sizes: int) -> Tensor:
        return self.g_BLHN.new_empty(len(self.g_BLHN), *sizes)

    def states_before(self) -> tuple[Tensor, Tensor, Tensor]:
        """The state before every chunk, the decays of whole chunks, and the state after the row."""
        heads, keys, values = *self.k_BLHN.shape[2:], self.v_BLHP.shape[3]
        states_BCHNP, whole_BCHN = self.empty(self.chunks, heads, keys, values), self.empty(self.chunks, heads, keys)
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
        """Gradients of the state after every chunk, what decays of whole chunks are worth, and the first state's."""
        states_BCHNP, through_BCHN = torch.empty_like(before_BCHNP), torch.empty_like(whole_BCHN)
        grad_state_BHNP = torch.empty_like(grad_last_BHNP)
        self._added(self.q_BLHN, dy_BLHP, states_BCHNP, whole_BCHN, reverse=True)
        forward_kernels.pass_states[self.state_grid](
            states_BCHNP, whole_BCHN, grad_last_BHNP, grad_state_BHNP, before_BCHNP, through_BCHN, self.chunks,
            self.lengths[1], START=True, REVERSED=True, **self._state_blocks,
        )  # fmt: skip
        return states_BCHNP, through_BCHN, grad_state_BHNP

    def _added(self, left: Tensor, right: Tensor, states: Tensor, whole: Tensor, reverse: bool) -> None:
        forward_kernels.chunk_states[self.grid(1, math.prod(self.slices))](
            left, right, *self.decays, states, whole, *self.lengths, REVERSED=reverse,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip

    def scores(self) -> Tensor:
        """A (B, H, L, T)."""
        length, heads = self.lengths
        scores_BHLT = self.empty(heads, length, self.tiles.chunk)
        forward_kernels.scores[self.grid(self.tiles.chunk // self.tiles.part, 1)](
            self.q_BLHN, self.k_BLHN, *self.decays, scores_BHLT, length, heads,
            **self.constants("DOCUMENTS", "N", "PART", "BLOCK_N", "KEYS"),
        )  # fmt: skip
        return scores_BHLT

    def outputs(self, scores_BHLT: Tensor, before_BCHNP: Tensor) -> Tensor:
        y_BLHP = torch.empty_like(self.v_BLHP)
        forward_kernels.outputs[self.grid(1, self.slices[1])](
            scores_BHLT, self.q_BLHN, *self.decays, self.v_BLHP, before_BCHNP, y_BLHP, *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip
        return y_BLHP

    def value_gradients(self, scores_BHLT: Tensor, dy_BLHP: Tensor, after_BCHNP: Tensor) -> Tensor:
        grad_v_BLHP = torch.empty_like(self.v_BLHP)
        backward_kernels.value_gradients[self.grid(1, self.slices[1])](
            scores_BHLT, self.k_BLHN, *self.decays, dy_BLHP, after_BCHNP, grad_v_BLHP, *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES"),
        )  # fmt: skip
        return grad_v_BLHP

    def pair_weights(self, dy_BLHP: Tensor) -> Tensor:
        """M (B, H, L, T)."""
        length, heads = self.lengths
        weights_BHLT = self.empty(heads, length, self.tiles.chunk)
        backward_kernels.pair_weights[self.grid(1, 1)](
            dy_BLHP, self.v_BLHP, weights_BHLT, length, heads, **self.constants("P", "BLOCK_P", "VALUES")
        )
        return weights_BHLT

    def pair_gradients(self, weights_BHLT: Tensor) -> tuple[Tensor, Tensor]:
        """What queries and keys get through pairs of different tokens, in fp32."""
        grads = torch.empty_like(self.g_BLHN), torch.empty_like(self.g_BLHN)
        kernels = backward_kernels.query_pairs, backward_kernels.key_pairs
        for kernel, other, grad in zip(kernels, (self.k_BLHN, self.q_BLHN), grads, strict=True):
            kernel[self.grid(self.tiles.chunk // self.tiles.part, self.slices[0])](
                other, *self.decays, weights_BHLT, grad, *self.lengths,
                **self.constants("DOCUMENTS", "N", "PART", "BLOCK_N", "KEYS"),
            )  # fmt: skip
        return grads

    def token_gradients(
        self, dy: Tensor, before: Tensor, after: Tensor, through: Tensor, pairs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """dq, dk and dg."""
        grads = tuple(map(torch.empty_like, (self.q_BLHN, self.k_BLHN, self.g_BLHN)))
        backward_kernels.token_gradients[self.grid(1, self.slices[0])](
            self.q_BLHN, self.k_BLHN, self.v_BLHP, *self.decays, dy, before, after, through, *pairs, *grads,
            *self.lengths,
            **self.constants("DOCUMENTS", "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES") | {"num_warps": 8},
        )  # fmt: skip
        return grads
