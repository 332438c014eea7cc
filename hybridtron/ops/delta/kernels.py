"""The launches of the Triton kernels of the delta rule (`kernels_forward`, `kernels_pairs`, `kernels_backward`).

Backward keeps the inputs alone and walks over the chunks again. A product's factors are rounded to the type of q, k and
v where that is bf16, summed in fp32, and what lies between kernels as factors alone is in that type too; fp16 goes
through tf32, which holds it exactly and a state's range too; fp32 stays fp32. States, decays and the triangle that is
inverted are fp32. The same call gives the same bits again. Right on an H200 (benchmarks/gpu.md).

Legend: as in `kernels_forward`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.delta import kernels_backward, kernels_forward, kernels_pairs
from hybridtron.ops.delta.kernels_tiles import NARROW, SIZES, WIDE, DeltaTiles, tiles
from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla.kernels_row import ChunkedKernelRow
from hybridtron.ops.kernel_launch import ceil_div, power_of_2
from hybridtron.ops.ssd.kernels_row import products_of

# To a type checker a kernel is the Python function that it is written as, which can't be launched.
forward_kernels: Any = kernels_forward
pair_kernels: Any = kernels_pairs
backward_kernels: Any = kernels_backward


def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """q, k and v in one type, the widest of theirs; steps, decays and states in fp32."""
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, state_BHNP, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLHN, k_BLHN, v_BLHP)))
    q, k, v = (t.to(shared) for t in (q_BLHN, k_BLHN, v_BLHP))
    state = None if state_BHNP is None else state_BHNP.float()
    starts_BL = document_starts(documents_BL)
    y_BLHP, last_BHNP = _TritonDelta.apply(q, k, v, beta_BLH.float(), g_BLHG.float(), state, starts_BL)
    return y_BLHP.to(v_BLHP.dtype), last_BHNP


class _TritonDelta(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        contiguous: list[Any] = [t if t is None else t.contiguous() for t in fields]
        row = DeltaKernelRow(*contiguous)
        ctx.save_for_backward(*row)
        walked = row.walked()
        return row.outputs(walked), walked.last_BHNP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHNP: Tensor) -> tuple[Tensor | None, ...]:
        row, dy_BLHP = DeltaKernelRow(*ctx.saved_tensors), grad_y_BLHP.contiguous()
        walked = row.walked()
        du_BLHP, after_BCHNP, grad_state = row.walked_back(walked, dy_BLHP, grad_last_BHNP.contiguous())
        weights, grad_v, grad_beta = row.pair_weights(walked, dy_BLHP, du_BLHP)
        pairs = row.pair_gradients(walked.scores, weights)
        grad_q, grad_k, grad_g = row.token_gradients(walked, dy_BLHP, du_BLHP, after_BCHNP, pairs)
        return grad_q, grad_k, grad_v, grad_beta, grad_g, None if row.state_BHNP is None else grad_state, None


Pair = tuple[Tensor, Tensor]


class Walked(NamedTuple):
    """What forward makes before it makes outputs, and backward makes again."""

    scores: Pair  # A and P
    enter: Pair  # q F and k F
    k_leave_BLHN: Tensor
    whole_BCHG: Tensor
    before_BCHNP: Tensor
    last_BHNP: Tensor
    w_BLHP: Tensor


class DeltaKernelRow(ChunkedKernelRow, DeltaInputs):
    """The launches of one row."""

    @property
    def tiles(self) -> DeltaTiles:
        return tiles(self.v_BLHP.dtype)

    @property
    def by_head(self) -> bool:
        return self.g_BLHG.shape[3] == 1

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        return self.q_BLHN, self.k_BLHN

    @property
    def decays(self) -> tuple[Tensor, Tensor]:
        return self.g_BLHG, self.starts

    @property
    def starts(self) -> Tensor:
        """Without documents something to point at."""
        return self.g_BLHG if self.documents_BL is None else self.documents_BL

    @property
    def blocks(self) -> dict[str, int]:
        keys, values = (max(16, power_of_2(t.shape[3])) for t in (self.k_BLHN, self.v_BLHP))
        of = self.tiles
        return {"BLOCK_N": keys, "BLOCK_P": values, "KEYS": min(of.keys, keys), "VALUES": min(of.values, values)}

    def constants(self, *names: str) -> dict[str, Any]:
        """Sizes of tiles, and of others those that are named."""
        return self.named(names, {**products_of(self.v_BLHP.dtype), "BY_HEAD": self.by_head})

    @property
    def of_pairs(self) -> dict[str, int]:
        """What is different for kernels of pairs where every channel has a decay."""
        if self.by_head:
            return {}
        halvings = self.tiles.chunk.bit_length() - 1
        return {"HALVINGS": halvings, "KEYS": min(self.tiles.decayed_keys, self.blocks["BLOCK_N"])} | WIDE

    def factor(self, *sizes: int) -> Tensor:
        """An empty tensor of what is a factor of products alone."""
        dtype = torch.float32 if self.v_BLHP.dtype == torch.float16 else self.v_BLHP.dtype
        return self.v_BLHP.new_empty(len(self.v_BLHP), *sizes, dtype=dtype)

    def walked(self) -> Walked:
        scores, (q_enter, k_enter, k_leave, whole) = self.scores(), self.factors()
        X_BHLT = self.inverse(scores[1], of_rows=False)
        length, heads, keys = self.k_BLHN.shape[1:]
        values = self.v_BLHP.shape[3]
        before_BCHNP = self.g_BLHG.new_empty(len(self.g_BLHG), self.chunks, heads, keys, values)
        last_BHNP, w_BLHP = torch.empty_like(before_BCHNP[:, 0]).contiguous(), self.factor(length, heads, values)
        start = last_BHNP if self.state_BHNP is None else self.state_BHNP
        forward_kernels.walk[self.walks](
            self.v_BLHP, self.beta_BLH, self.starts, k_enter, k_leave, whole, X_BHLT, start, last_BHNP,
            before_BCHNP, w_BLHP, length, heads, self.chunks, START=self.state_BHNP is not None,
            **self.constants("BY_HEAD", "DOCUMENTS", "N", "P", "BLOCK_N", "PRODUCT", "PRECISION") | self.carried,
        )  # fmt: skip
        return Walked(scores, (q_enter, k_enter), k_leave, whole, before_BCHNP, last_BHNP, w_BLHP)

    @property
    def carried(self) -> dict[str, int]:
        return {"VALUES": self.tiles.walk} | WIDE

    @property
    def walks(self) -> tuple[int, int, int]:
        rows, _, heads, values = self.v_BLHP.shape
        return ceil_div(values, self.carried["VALUES"]), heads, rows

    def scores(self) -> Pair:
        length, heads = self.lengths
        made = (
            self.factor(heads, length, self.tiles.chunk),
            self.g_BLHG.new_empty(len(self.g_BLHG), heads, length, self.tiles.chunk),
        )
        kernel = pair_kernels.scores_by_head if self.by_head else pair_kernels.scores_by_channel
        kernel[self.grid(1, 1)](
            *self.tokens, *self.decays, *made, length, heads,
            **self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS", "PRODUCT", "PRECISION") | self.of_pairs,
        )  # fmt: skip
        return made

    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q F, k F, k L and W."""
        length, heads, keys = self.k_BLHN.shape[1:]
        q_enter, k_enter, k_leave = (self.factor(length, heads, keys) for _ in range(3))
        whole_BCHG = self.g_BLHG.new_empty(len(self.g_BLHG), self.chunks, heads, self.g_BLHG.shape[3])
        forward_kernels.factors[self.grid(1, self.slices[0])](
            *self.tokens, *self.decays, q_enter, k_enter, k_leave, whole_BCHG, length, heads,
            **self.constants("BY_HEAD", "DOCUMENTS", "N", "BLOCK_N", "KEYS") | WIDE,
        )  # fmt: skip
        return q_enter, k_enter, k_leave, whole_BCHG

    def inverse(self, P_BHLT: Tensor, of_rows: bool) -> Tensor:
        """X, or with the steps of rows Z."""
        inverse_BHLT, merges = self.factor(*P_BHLT.shape[1:]), (self.tiles.chunk // self.tiles.part).bit_length() - 1
        forward_kernels.inverse[self.grid(1, 1)](
            P_BHLT,
            self.beta_BLH,
            inverse_BHLT,
            *self.lengths,
            OF_ROWS=of_rows,
            MERGES=merges,
            **self.constants("PART") | NARROW,
        )
        return inverse_BHLT

    def outputs(self, walked: Walked) -> Tensor:
        y_BLHP = torch.empty_like(self.v_BLHP)
        forward_kernels.outputs[self.grid(1, self.slices[1])](
            walked.scores[0], self.beta_BLH, walked.w_BLHP, walked.enter[0], self.starts, walked.before_BCHNP, y_BLHP,
            *self.lengths, **self.constants("DOCUMENTS", *SIZES),
        )  # fmt: skip
        return y_BLHP

    def walked_back(self, walked: Walked, dy_BLHP: Tensor, grad_last_BHNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """du, and the gradients of the states after the chunks and before the row."""
        Z_BHLT = self.inverse(walked.scores[1], of_rows=True)
        du, after = torch.empty_like(walked.w_BLHP), torch.empty_like(walked.before_BCHNP)
        grad_state = torch.empty_like(grad_last_BHNP)
        backward_kernels.walk_back[self.walks](
            dy_BLHP, self.beta_BLH, walked.scores[0], Z_BHLT, *walked.enter, walked.k_leave_BLHN,
            walked.whole_BCHG, grad_last_BHNP, grad_state, after, du, *self.lengths, self.chunks,
            **self.constants("BY_HEAD", "N", "P", "BLOCK_N", "PRODUCT", "PRECISION") | self.carried,
        )  # fmt: skip
        return du, after, grad_state

    def pair_weights(self, walked: Walked, dy_BLHP: Tensor, du_BLHP: Tensor) -> tuple[Pair, Tensor, Tensor]:
        """M and Q, and the gradients of v and beta."""
        weights = torch.empty_like(walked.scores[0]), torch.empty_like(walked.scores[0])
        grads = torch.empty_like(self.v_BLHP), torch.empty_like(self.beta_BLH)
        backward_kernels.pair_weights[self.grid(1, 1)](
            dy_BLHP, self.beta_BLH, walked.w_BLHP, du_BLHP, *weights, *grads, *self.lengths,
            **self.constants("P", "BLOCK_P", "VALUES", "PRODUCT", "PRECISION"),
        )  # fmt: skip
        return weights, *grads

    def pair_gradients(self, scores: Pair, weights: Pair) -> tuple[Tensor, Tensor, Tensor]:
        """What queries and keys get through pairs, in fp32, and the gain."""
        of_q, of_k = (torch.empty_like(t, dtype=torch.float32) for t in self.tokens)
        made = of_q, of_k, torch.empty_like(self.g_BLHG)
        given = (*self.tokens, *self.decays, *scores) if self.by_head else (*self.tokens, *self.decays)
        kernel = pair_kernels.pairs_by_head if self.by_head else pair_kernels.pairs_by_channel
        constants = self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS", "PRODUCT", "PRECISION") | self.of_pairs
        kernel[self.grid(1, constants["BLOCK_N"] // constants["KEYS"])](
            *given, *weights, *made, *self.lengths, **constants
        )
        return made

    def token_gradients(
        self, walked: Walked, dy: Tensor, du: Tensor, after: Tensor, pairs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dg."""
        shares = self.slices[0] if self.by_head else 1
        grad_q, grad_k = map(torch.empty_like, self.tokens)
        grad_g_SBLHG = self.g_BLHG.new_empty(shares, *self.g_BLHG.shape)
        backward_kernels.token_gradients[self.grid(1, self.slices[0])](
            *self.tokens, self.beta_BLH, *self.decays, dy, walked.w_BLHP, du, walked.before_BCHNP, after, *pairs,
            grad_q, grad_k, grad_g_SBLHG, *self.lengths, **self.constants("BY_HEAD", "DOCUMENTS", *SIZES) | WIDE,
        )  # fmt: skip
        return grad_q, grad_k, grad_g_SBLHG.sum(0)
