"""Triton kernels for the backward pass of sparse attention.

Let i be a query, and let j be a key. The attention weights a_ij are recomputed from the saved log-sum-exps. y_i is the
output, dy_i is its gradient, D_i is dy_i . y_i, and ds_ij = a_ij (dy_i . v_j - D_i) is the gradient of the score
q_i . k_j:

    along_outputs     D_i                        a program for QUERIES queries
    query_gradients   dq_i = sum_j ds_ij k_j     a program for each query tile
    key_gradients     dk_j = sum_i ds_ij q_i     a program for each key tile
    value_gradients   dv_j = sum_i a_ij dy_i     a program for each key tile and each slice of v's channels

A part is the pairs (query, key) that one rule selects (`kernels_forward`). In each part, the queries that see a key
are contiguous among the sorted queries. There are two kinds of parts:

    stretch   a query sees a contiguous range of the sorted keys; queries are sorted by the ends of these ranges
    kept      queries are in text order; a key is seen from its own token on, until it is no longer among the
              best keys

Every key is in exactly one key tile per part. In the kept part, a key tile contains keys that are seen by about equally
many queries. The launch for a second part adds to the first part's gradients. No kernel uses atomics, so results are
deterministic.

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (remembered keys of the
row's first document, then the row's L keys), N key size, P value size, Q queries in a tile, W keys in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.sparse.kernels_forward import any_of, masked_scores, rows_of, tile_of_queries, visible_pairs
from hybridtron.ops.ssd.kernels_forward import product


@triton.jit
def along_outputs(
    y_RLP: tl.tensor, dy_RLP: tl.tensor, along_RL: tl.tensor, queries: int, P: tl.constexpr, QUERIES: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:  # fmt: skip
    """Store D (`along`) for QUERIES queries. Grid: all rows' query blocks."""
    query_Q = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    there_Q = query_Q < queries
    along_Q = tl.zeros([QUERIES], tl.float32)
    for start in range(0, P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        y_QP = rows_of(y_RLP, query_Q, there_Q, p_P, P).to(tl.float32)
        along_Q += tl.sum(y_QP * rows_of(dy_RLP, query_Q, there_Q, p_P, P).to(tl.float32), axis=1)
    tl.store(along_RL + query_Q, along_Q, mask=there_Q)


@triton.jit
def weights_of(
    q_QN: tl.tensor, k_WN: tl.tensor, visible_QW: tl.tensor, sums_Q: tl.tensor, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a tile's attention weights a, which are 0 for invisible pairs."""
    finite_Q = tl.where(sums_Q == float("-inf"), 0.0, sums_Q)
    return tl.exp(masked_scores(q_QN, k_WN, visible_QW, PRODUCT, PRECISION) - finite_Q[:, None])


@triton.jit
def score_gradients(
    weight_QW: tl.tensor, v_SP: tl.tensor, dy_LP: tl.tensor, along_Q: tl.tensor, query_Q: tl.tensor,
    there_Q: tl.tensor, key_W: tl.tensor, P: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return ds for a tile; dy . v is summed over slices with VALUES channels."""
    found_QW = tl.zeros([QUERIES, KEYS], tl.float32)
    for start in range(0, P, VALUES):
        p_P = start + tl.arange(0, VALUES)
        dy_QP = rows_of(dy_LP, query_Q, there_Q, p_P, P)
        v_WP = rows_of(v_SP, key_W, key_W >= 0, p_P, P)
        found_QW += product(dy_QP, tl.trans(v_WP), PRODUCT, PRECISION)
    return weight_QW * (found_QW - along_Q[:, None])


@triton.jit
def query_gradients(
    q_RLN: tl.tensor, k_RSN: tl.tensor, v_RSP: tl.tensor, queries_RL: tl.tensor, keys: tl.tensor, first_RL: tl.tensor,
    end_RL: tl.tensor, until_RS: tl.tensor, other_first_RL: tl.tensor, other_end_RL: tl.tensor,
    other_rank_RS: tl.tensor, sums_RL: tl.tensor, dy_RLP: tl.tensor, along_RL: tl.tensor, dq_RLN: tl.tensor,
    length: int, total: int, width: int, most: int, KEPT: tl.constexpr, EXCEPT: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dq for a query tile; a second part adds to the first part's dq. Grid: rows * query tiles."""
    row, query_Q, there_Q, begin, stop, listed = tile_of_queries(
        queries_RL, keys, first_RL, end_RL, length, total, width, KEPT, QUERIES
    )
    n_N = tl.arange(0, BLOCK_N)
    q_QN = rows_of(q_RLN + row * length * N, query_Q, there_Q, n_N, N)
    sums_Q = tl.load(sums_RL + row * length + query_Q, mask=there_Q, other=0.0)
    along_Q = tl.load(along_RL + row * length + query_Q, mask=there_Q, other=0.0)
    dq_QN = tl.zeros([QUERIES, BLOCK_N], tl.float32)
    if EXCEPT:
        dq_QN = rows_of(dq_RLN + row * length * N, query_Q, there_Q, n_N, N)
    for start in range(begin, stop, KEYS):
        at_W = start + tl.arange(0, KEYS)
        key_W = tl.load(listed + at_W, mask=at_W < stop, other=-1)
        visible_QW = visible_pairs(
            query_Q, there_Q, key_W, at_W, first_RL, end_RL, until_RS, other_first_RL, other_end_RL, other_rank_RS,
            row, length, total, KEPT, EXCEPT,
        )  # fmt: skip
        if any_of(visible_QW):
            k_WN = rows_of(k_RSN + row * total * N, key_W, key_W >= 0, n_N, N)
            weight_QW = weights_of(q_QN, k_WN, visible_QW, sums_Q, PRODUCT, PRECISION)
            ds_QW = score_gradients(
                weight_QW, v_RSP + row * total * P, dy_RLP + row * length * P, along_Q, query_Q, there_Q, key_W, P,
                QUERIES, KEYS, VALUES, PRODUCT, PRECISION,
            )  # fmt: skip
            dq_QN += product(ds_QW, k_WN, PRODUCT, PRECISION)
    at_QN = (row * length + query_Q)[:, None] * N + n_N[None, :]
    tl.store(dq_RLN + at_QN, dq_QN, mask=tl.expand_dims(there_Q, 1) & tl.expand_dims(n_N < N, 0))


@triton.jit
def run_of_queries(
    from_S: tl.tensor, until_S: tl.tensor, at_W: tl.tensor, length: int, total: int,
) -> tuple:  # fmt: skip
    """Return the begin and end of the range of queries that see any of these keys.

    Begin and end are positions among the sorted queries, and `at_W` are positions among the sorted keys. If no query
    sees any of these keys, the end is 0.
    """
    from_W = tl.load(from_S + at_W, mask=at_W < total, other=0)
    until_W = tl.load(until_S + at_W, mask=at_W < total, other=0)
    some_W = from_W < until_W
    return tl.min(tl.where(some_W, from_W, length), axis=0), tl.max(tl.where(some_W, until_W, 0), axis=0)


@triton.jit
def tile_of_keys(
    keys_RS: tl.tensor, from_RS: tl.tensor, to_RS: tl.tensor, length: int, total: int, KEYS: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return a program's row, its keys' positions and indices, and the range of queries that see any of them."""
    tiles = tl.cdiv(total, KEYS)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    at_W = tile * KEYS + tl.arange(0, KEYS)
    key_W = tl.load(keys_RS + row * total + at_W, mask=at_W < total, other=-1)
    begin, stop = run_of_queries(from_RS + row * total, to_RS + row * total, at_W, length, total)
    return row, at_W, key_W, begin, stop


@triton.jit
def queries_from(start: int, stop: int, queries_L: tl.tensor, QUERIES: tl.constexpr) -> tuple:
    """Return the indices of the next QUERIES queries in a range, and a mask for valid indices."""
    at_Q = start + tl.arange(0, QUERIES)
    there_Q = at_Q < stop
    return tl.load(queries_L + at_Q, mask=there_Q, other=0), there_Q


@triton.jit
def key_gradients(
    q_RLN: tl.tensor, k_RSN: tl.tensor, v_RSP: tl.tensor, queries_RL: tl.tensor, keys_RS: tl.tensor,
    from_RS: tl.tensor, to_RS: tl.tensor, first_RL: tl.tensor, end_RL: tl.tensor, until_RS: tl.tensor,
    other_first_RL: tl.tensor, other_end_RL: tl.tensor, other_rank_RS: tl.tensor, sums_RL: tl.tensor,
    dy_RLP: tl.tensor, along_RL: tl.tensor, dk_RSN: tl.tensor, length: int, total: int, most: int,
    KEPT: tl.constexpr, EXCEPT: tl.constexpr, N: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dk for a key tile; a second part adds to the first part's dk. Grid: rows * key tiles."""
    row, at_W, key_W, begin, stop = tile_of_keys(keys_RS, from_RS, to_RS, length, total, KEYS)
    n_N = tl.arange(0, BLOCK_N)
    k_WN = rows_of(k_RSN + row * total * N, key_W, key_W >= 0, n_N, N)
    dk_WN = tl.zeros([KEYS, BLOCK_N], tl.float32)
    if EXCEPT:
        dk_WN = rows_of(dk_RSN + row * total * N, key_W, key_W >= 0, n_N, N)
    for start in range(begin, stop, QUERIES):
        query_Q, there_Q = queries_from(start, stop, queries_RL + row * length, QUERIES)
        visible_QW = visible_pairs(
            query_Q, there_Q, key_W, at_W, first_RL, end_RL, until_RS, other_first_RL, other_end_RL, other_rank_RS,
            row, length, total, KEPT, EXCEPT,
        )  # fmt: skip
        if any_of(visible_QW):
            q_QN = rows_of(q_RLN + row * length * N, query_Q, there_Q, n_N, N)
            sums_Q = tl.load(sums_RL + row * length + query_Q, mask=there_Q, other=0.0)
            along_Q = tl.load(along_RL + row * length + query_Q, mask=there_Q, other=0.0)
            weight_QW = weights_of(q_QN, k_WN, visible_QW, sums_Q, PRODUCT, PRECISION)
            ds_QW = score_gradients(
                weight_QW, v_RSP + row * total * P, dy_RLP + row * length * P, along_Q, query_Q, there_Q, key_W, P,
                QUERIES, KEYS, VALUES, PRODUCT, PRECISION,
            )  # fmt: skip
            dk_WN += product(tl.trans(ds_QW), q_QN, PRODUCT, PRECISION)
    at_WN = (row * total + key_W)[:, None] * N + n_N[None, :]
    tl.store(dk_RSN + at_WN, dk_WN, mask=tl.expand_dims(key_W >= 0, 1) & tl.expand_dims(n_N < N, 0))


@triton.jit
def value_gradients(
    q_RLN: tl.tensor, k_RSN: tl.tensor, queries_RL: tl.tensor, keys_RS: tl.tensor, from_RS: tl.tensor,
    to_RS: tl.tensor, first_RL: tl.tensor, end_RL: tl.tensor, until_RS: tl.tensor, other_first_RL: tl.tensor,
    other_end_RL: tl.tensor, other_rank_RS: tl.tensor, sums_RL: tl.tensor, dy_RLP: tl.tensor, dv_RSP: tl.tensor,
    length: int, total: int, most: int, KEPT: tl.constexpr, EXCEPT: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store VALUES channels of dv for a key tile; a second part adds to the first part's dv.

    Grid: (rows * key tiles, slices with VALUES channels).
    """
    row, at_W, key_W, begin, stop = tile_of_keys(keys_RS, from_RS, to_RS, length, total, KEYS)
    n_N = tl.arange(0, BLOCK_N)
    p_P = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    k_WN = rows_of(k_RSN + row * total * N, key_W, key_W >= 0, n_N, N)
    dv_WP = tl.zeros([KEYS, VALUES], tl.float32)
    if EXCEPT:
        dv_WP = rows_of(dv_RSP + row * total * P, key_W, key_W >= 0, p_P, P)
    for start in range(begin, stop, QUERIES):
        query_Q, there_Q = queries_from(start, stop, queries_RL + row * length, QUERIES)
        visible_QW = visible_pairs(
            query_Q, there_Q, key_W, at_W, first_RL, end_RL, until_RS, other_first_RL, other_end_RL, other_rank_RS,
            row, length, total, KEPT, EXCEPT,
        )  # fmt: skip
        if any_of(visible_QW):
            q_QN = rows_of(q_RLN + row * length * N, query_Q, there_Q, n_N, N)
            sums_Q = tl.load(sums_RL + row * length + query_Q, mask=there_Q, other=0.0)
            weight_QW = weights_of(q_QN, k_WN, visible_QW, sums_Q, PRODUCT, PRECISION)
            dy_QP = rows_of(dy_RLP + row * length * P, query_Q, there_Q, p_P, P)
            dv_WP += product(tl.trans(weight_QW), dy_QP, PRODUCT, PRECISION)
    at_WP = (row * total + key_W)[:, None] * P + p_P[None, :]
    tl.store(dv_RSP + at_WP, dv_WP, mask=tl.expand_dims(key_W >= 0, 1) & tl.expand_dims(p_P < P, 0))
