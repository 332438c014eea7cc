"""Launches for the delta rule's Triton kernels (`kernels_forward`, `kernels_pairs`, `kernels_backward`).

Only the inputs are saved; the backward pass recomputes the intermediate results. Results are deterministic. The kernels
were checked on an H200 (benchmarks/gpu.md).

The dtype of q, k and v decides how matrices are multiplied. For bf16, both factors are cast to bf16; tensors that are
used only as factors are also stored in bf16. For fp16, tf32 is used: it represents fp16 numbers exactly and has the
range that states need. For fp32, factors stay fp32. Accumulations, states, decays and the triangular matrix's inverse
are fp32.

The recurrence is in `reference.py`. These names are used for a chunk of T tokens; h is the state before the chunk:

    F_i, L_j, W    products of the chunk's decays: up to token i, after token j, and over all tokens
    A_ij, P_ij     scores of token i's query (A) and of token i's key (P) with token j's key
    X, Z           (I + P diag(beta))^-1 and (I + diag(beta) P)^-1
    w, u           corrections w = X (v - h^T (k F)), and u = beta w
    dh             state gradient after the chunk
    M, Q           gradients for A and P
    gain_i         gradient for the log decays' sum up to token i

F, L and W multiply vectors over key channels elementwise. The gradients for y, u, q, k, v, beta and g are called dy,
du, dq, dk, dv, dbeta and dg.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, G = N or 1 (a
decay per key channel or per head), T tokens per chunk, C chunks, S slices along the key channels.
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

# A type checker sees a kernel as a Python function, which can't be launched. `Any` turns this check off.
forward_kernels: Any = kernels_forward
pair_kernels: Any = kernels_pairs
backward_kernels: Any = kernels_backward


def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return y and the state after the row. q, k and v are cast to their widest dtype; other inputs to fp32."""
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, state_BHNP, documents_BL = inputs
    shared = functools.reduce(torch.promote_types, (t.dtype for t in (q_BLHN, k_BLHN, v_BLHP)))
    q, k, v = (t.to(shared) for t in (q_BLHN, k_BLHN, v_BLHP))
    state = None if state_BHNP is None else state_BHNP.float()
    starts_BL = document_starts(documents_BL)
    y_BLHP, last_BHNP = _TritonDelta.apply(q, k, v, beta_BLH.float(), g_BLHG.float(), state, starts_BL)
    return y_BLHP.to(v_BLHP.dtype), last_BHNP


class _TritonDelta(torch.autograd.Function):
    """Autograd function around all kernels. It saves only the inputs for the backward pass."""

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
        row = DeltaKernelRow(*ctx.saved_tensors)
        dy_BLHP = grad_y_BLHP.contiguous()
        walked = row.walked()
        du_BLHP, after_BCHNP, grad_state = row.walked_back(walked, dy_BLHP, grad_last_BHNP.contiguous())
        weights, grad_v, grad_beta = row.pair_weights(walked, dy_BLHP, du_BLHP)
        pairs = row.pair_gradients(walked.scores, weights)
        grad_q, grad_k, grad_g = row.token_gradients(walked, dy_BLHP, du_BLHP, after_BCHNP, pairs)
        return grad_q, grad_k, grad_v, grad_beta, grad_g, None if row.state_BHNP is None else grad_state, None


Pair = tuple[Tensor, Tensor]  # a tensor for queries, and a tensor for keys


class Walked(NamedTuple):
    """Results from the forward kernels `scores`, `factors` and `walk`. The backward pass recomputes them."""

    scores: Pair  # A, P
    enter: Pair  # q F, k F
    k_leave_BLHN: Tensor  # k L
    whole_BCHG: Tensor  # W
    before_BCHNP: Tensor  # h, the state before each chunk
    last_BHNP: Tensor  # the state after the row
    w_BLHP: Tensor  # corrections


class DeltaKernelRow(ChunkedKernelRow, DeltaInputs):
    """The op's inputs, contiguous, with a method for each kernel launch."""

    @property
    def tiles(self) -> DeltaTiles:
        """Tile sizes for v's dtype."""
        return tiles(self.v_BLHP.dtype)

    @property
    def by_head(self) -> bool:
        """True for one decay per head, False for one per key channel."""
        return self.g_BLHG.shape[3] == 1

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Queries and keys."""
        return self.q_BLHN, self.k_BLHN

    @property
    def decays(self) -> tuple[Tensor, Tensor]:
        """Log decays, and a mask for tokens that begin a document."""
        return self.g_BLHG, self.starts

    @property
    def starts(self) -> Tensor:
        """Mask of the tokens that begin a document. The field `documents_BL` holds this mask, not document numbers.

        Without documents, no kernel reads the mask, and g is passed in its place.
        """
        return self.g_BLHG if self.documents_BL is None else self.documents_BL

    @property
    def blocks(self) -> dict[str, int]:
        """Kernel constants for sizes along a head's channels, as {name: size}.

        BLOCK_N, BLOCK_P: numbers of key channels and value channels, padded to a power of two
        KEYS, VALUES: key channels and value channels per slice
        """
        keys, values = (max(16, power_of_2(t.shape[3])) for t in (self.k_BLHN, self.v_BLHP))
        of = self.tiles
        return {"BLOCK_N": keys, "BLOCK_P": values, "KEYS": min(of.keys, keys), "VALUES": min(of.values, values)}

    def constants(self, *names: str) -> dict[str, Any]:
        """Return a kernel's constants and compiler options.

        The result has the constants that `names` lists, and in addition CHUNK, `num_warps` and `num_stages`.
        """
        return self.named(names, {**products_of(self.v_BLHP.dtype), "BY_HEAD": self.by_head})

    @property
    def of_pairs(self) -> dict[str, int]:
        """Constants that `kernels_pairs` needs for a decay per key channel; they override the result of `constants`."""
        if self.by_head:
            return {}
        halvings = self.tiles.chunk.bit_length() - 1
        return {"HALVINGS": halvings, "KEYS": min(self.tiles.decayed_keys, self.blocks["BLOCK_N"])} | WIDE

    def factor(self, *sizes: int) -> Tensor:
        """Return an uninitialized tensor (B, *sizes) for factors of matrix multiplications.

        The tensor is fp32 if v is fp16, and has v's dtype otherwise.
        """
        dtype = torch.float32 if self.v_BLHP.dtype == torch.float16 else self.v_BLHP.dtype
        return self.v_BLHP.new_empty(len(self.v_BLHP), *sizes, dtype=dtype)

    def walked(self) -> Walked:
        """Run the kernels `scores`, `factors`, `inverse` and `walk`, which compute the forward pass except y."""
        scores = self.scores()
        q_enter, k_enter, k_leave, whole = self.factors()
        X_BHLT = self.inverse(scores[1], of_rows=False)
        length, heads, keys = self.k_BLHN.shape[1:]
        values = self.v_BLHP.shape[3]
        before_BCHNP = self.g_BLHG.new_empty(len(self.g_BLHG), self.chunks, heads, keys, values)
        last_BHNP = torch.empty_like(before_BCHNP[:, 0]).contiguous()
        w_BLHP = self.factor(length, heads, values)
        start = last_BHNP if self.state_BHNP is None else self.state_BHNP
        forward_kernels.walk[self.walks](
            self.v_BLHP, self.beta_BLH, self.starts, k_enter, k_leave, whole, X_BHLT, start, last_BHNP,
            before_BCHNP, w_BLHP, length, heads, self.chunks, START=self.state_BHNP is not None,
            **self.constants("BY_HEAD", "DOCUMENTS", "N", "P", "BLOCK_N", "PRODUCT", "PRECISION") | self.carried,
        )  # fmt: skip
        return Walked(scores, (q_enter, k_enter), k_leave, whole, before_BCHNP, last_BHNP, w_BLHP)

    @property
    def carried(self) -> dict[str, int]:
        """Constants for the kernels `walk` and `walk_back`, which loop over a row's chunks."""
        return {"VALUES": self.tiles.walk} | WIDE

    @property
    def walks(self) -> tuple[int, int, int]:
        """Grid for the kernels `walk` and `walk_back`: (value slices, heads, rows)."""
        rows, _, heads, values = self.v_BLHP.shape
        return ceil_div(values, self.carried["VALUES"]), heads, rows

    def scores(self) -> Pair:
        """Return A and P (B, H, L, T)."""
        length, heads = self.lengths
        A_BHLT = self.factor(heads, length, self.tiles.chunk)
        P_BHLT = self.g_BLHG.new_empty(len(self.g_BLHG), heads, length, self.tiles.chunk)
        kernel = pair_kernels.scores_by_head if self.by_head else pair_kernels.scores_by_channel
        kernel[self.grid(1, 1)](
            *self.tokens, *self.decays, A_BHLT, P_BHLT, length, heads,
            **self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS", "PRODUCT", "PRECISION") | self.of_pairs,
        )  # fmt: skip
        return A_BHLT, P_BHLT

    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q F, k F, k L and W."""
        length, heads, keys = self.k_BLHN.shape[1:]
        q_enter, k_enter, k_leave = (self.factor(length, heads, keys) for _ in range(3))
        whole_BCHG = self.g_BLHG.new_empty(len(self.g_BLHG), self.chunks, heads, self.g_BLHG.shape[3])
        forward_kernels.factors[self.grid(1, self.slices[0])](
            *self.tokens, *self.decays, q_enter, k_enter, k_leave, whole_BCHG, length, heads,
            **self.constants("BY_HEAD", "DOCUMENTS", "N", "BLOCK_N", "KEYS") | WIDE,
        )  # fmt: skip
        return q_enter, k_enter, k_leave, whole_BCHG

    def inverse(self, P_BHLT: Tensor, of_rows: bool) -> Tensor:
        """Return Z if `of_rows` is True, else X. In Z, beta multiplies P's rows; in X, it multiplies P's columns."""
        inverse_BHLT = self.factor(*P_BHLT.shape[1:])
        merges = (self.tiles.chunk // self.tiles.part).bit_length() - 1
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
        """Return y."""
        y_BLHP = torch.empty_like(self.v_BLHP)
        forward_kernels.outputs[self.grid(1, self.slices[1])](
            walked.scores[0], self.beta_BLH, walked.w_BLHP, walked.enter[0], self.starts, walked.before_BCHNP, y_BLHP,
            *self.lengths, **self.constants("DOCUMENTS", *SIZES),
        )  # fmt: skip
        return y_BLHP

    def walked_back(self, walked: Walked, dy_BLHP: Tensor, grad_last_BHNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return du, dh after each chunk, and the state gradient before the row."""
        Z_BHLT = self.inverse(walked.scores[1], of_rows=True)
        du = torch.empty_like(walked.w_BLHP)
        after = torch.empty_like(walked.before_BCHNP)
        grad_state = torch.empty_like(grad_last_BHNP)
        backward_kernels.walk_back[self.walks](
            dy_BLHP, self.beta_BLH, walked.scores[0], Z_BHLT, *walked.enter, walked.k_leave_BLHN,
            walked.whole_BCHG, grad_last_BHNP, grad_state, after, du, *self.lengths, self.chunks,
            **self.constants("BY_HEAD", "N", "P", "BLOCK_N", "PRODUCT", "PRECISION") | self.carried,
        )  # fmt: skip
        return du, after, grad_state

    def pair_weights(self, walked: Walked, dy_BLHP: Tensor, du_BLHP: Tensor) -> tuple[Pair, Tensor, Tensor]:
        """Return M, Q, dv and dbeta."""
        M_BHLT = torch.empty_like(walked.scores[0])
        Q_BHLT = torch.empty_like(walked.scores[0])
        grad_v = torch.empty_like(self.v_BLHP)
        grad_beta = torch.empty_like(self.beta_BLH)
        backward_kernels.pair_weights[self.grid(1, 1)](
            dy_BLHP, self.beta_BLH, walked.w_BLHP, du_BLHP, M_BHLT, Q_BHLT, grad_v, grad_beta, *self.lengths,
            **self.constants("P", "BLOCK_P", "VALUES", "PRODUCT", "PRECISION"),
        )  # fmt: skip
        return (M_BHLT, Q_BHLT), grad_v, grad_beta

    def pair_gradients(self, scores: Pair, weights: Pair) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms in dq and dk that come from scores, in fp32, and the gain from scores."""
        of_q, of_k = (torch.empty_like(t, dtype=torch.float32) for t in self.tokens)
        gain = torch.empty_like(self.g_BLHG)
        kernel = pair_kernels.pairs_by_head if self.by_head else pair_kernels.pairs_by_channel
        constants = self.constants("DOCUMENTS", "N", "BLOCK_N", "KEYS", "PRODUCT", "PRECISION") | self.of_pairs
        kernel[self.grid(1, constants["BLOCK_N"] // constants["KEYS"])](
            *self.tokens, *self.decays, *(scores if self.by_head else ()), *weights, of_q, of_k, gain, *self.lengths,
            **constants,
        )  # fmt: skip
        return of_q, of_k, gain

    def token_gradients(
        self, walked: Walked, dy: Tensor, du: Tensor, after: Tensor, pairs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dg."""
        shares = self.slices[0] if self.by_head else 1
        grad_q, grad_k = map(torch.empty_like, self.tokens)
        grad_g_SBLHG = self.g_BLHG.new_empty(shares, *self.g_BLHG.shape)
        backward_kernels.token_gradients[self.grid(1, self.slices[0])](
            *self.tokens, self.beta_BLH, *self.decays, dy, walked.w_BLHP, du, walked.before_BCHNP, after, *pairs,
            grad_q, grad_k, grad_g_SBLHG, *self.lengths, **self.constants("BY_HEAD", "DOCUMENTS", *SIZES) | WIDE,
        )  # fmt: skip
        return grad_q, grad_k, grad_g_SBLHG.sum(0)
