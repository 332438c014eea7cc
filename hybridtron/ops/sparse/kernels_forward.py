"""Triton kernels of sparse attention, forward: until when keys are among the best, and attention by tiles of queries.

Who sees whom needs a few whole numbers of each token, and never a matrix of pairs:

    stretch  keys stand in an order, and a query sees those at `first` to `end` - 1 of it
    kept     a query sees the keys up to its own token that are among the best `until` later ones; what has left the
             best never returns, since the keys that are better only become more

A program attends for QUERIES queries, those of a stretch in the order of their ends. In that order `first` rises too,
so that what they see together is one run of keys: the runs of a row have as many keys as the row and `most` for each
tile. For kept keys it is a list, those that were the best before the tile and the tile's own.

A second part continues from the outputs and log-sum-exps of the first, and leaves out what that has shown.

Legend: R rows, L queries, S keys, of which the last L are the queries' own, N size of a key, P of a value; Q queries
and W keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import product


@triton.jit
def better(
    document: tl.tensor, score: tl.tensor, other_document: tl.tensor, other_score: tl.tensor, earlier: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Of a later document, of a larger score, or of an equal one and earlier."""
    same_score = (score == other_score) & earlier
    return (document > other_document) | ((document == other_document) & ((score > other_score) | same_score))


@triton.jit
def token_rank(documents_S: tl.tensor, scores_S: tl.tensor, index: tl.tensor, there: tl.tensor) -> tuple:
    """Documents and scores of some tokens; of none the document is -1."""
    return tl.load(documents_S + index, mask=there, other=-1), tl.load(scores_S + index, mask=there, other=0.0)


@triton.jit
def best_keys(
    documents_RS: tl.tensor, scores_RS: tl.tensor, until_RS: tl.tensor, lists_RTK: tl.tensor, total: int, past: int,
    before: int, tiles: int, most: int, QUERIES: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Until when each key of a row is among the best `most`, and those before each tile of queries, best first.

    A key's place among the best is the number of keys that are better. All of these are among the best themselves, so
    that places follow from tile to tile. The list after `before` tiles of remembered keys is that of the first queries.
    """
    row = tl.program_id(0).to(tl.int64)
    documents_RS, scores_RS, until_RS = documents_RS + row * total, scores_RS + row * total, until_RS + row * total
    lists_RTK += row * (before + tiles + 1) * most
    slot_K, place_Q = tl.arange(0, SLOTS), tl.arange(0, QUERIES)
    for tile in range(before + tiles):
        index_K = tl.load(lists_RTK + tile * most + slot_K, mask=slot_K < most, other=-1)
        filled_K = index_K >= 0
        document_K, score_K = token_rank(documents_RS, scores_RS, index_K, filled_K)
        token_Q = past + (tile - before) * QUERIES + place_Q
        there_Q = (token_Q >= 0) & (token_Q < total)
        document_Q, score_Q = token_rank(documents_RS, scores_RS, token_Q, there_Q)
        there_Q = there_Q & (document_Q >= 0)
        never = slot_K[:, None] < 0
        over_KQ = better(document_Q[None, :], score_Q[None, :], document_K[:, None], score_K[:, None], never)
        over_KQ = (over_KQ & filled_K[:, None] & there_Q[None, :]).to(tl.int32)
        lives_K = tl.sum((slot_K[:, None] + tl.cumsum(over_KQ, axis=1) < most).to(tl.int32), axis=1)
        tl.store(until_RS + index_K, past + (tile - before) * QUERIES + lives_K, mask=filled_K)
        over_QQ = better(
            document_Q[:, None], score_Q[:, None], document_Q[None, :], score_Q[None, :],
            place_Q[:, None] < place_Q[None, :],
        )  # fmt: skip
        over_QQ = (over_QQ & there_Q[:, None]).to(tl.int32)
        behind_Q = tl.sum(filled_K.to(tl.int32), axis=0) - tl.sum(over_KQ, axis=0)
        kept_QQ = (behind_Q[None, :] + tl.cumsum(over_QQ, axis=0) < most) & (place_Q[:, None] >= place_Q[None, :])
        tl.store(until_RS + token_Q, token_Q + tl.sum(kept_QQ.to(tl.int32), axis=0), mask=there_Q)
        at_K, at_Q = slot_K + tl.sum(over_KQ, axis=1), behind_Q + tl.sum(over_QQ, axis=0)
        after = lists_RTK + (tile + 1) * most
        tl.store(after + at_K, index_K, mask=filled_K & (at_K < most))
        tl.store(after + at_Q, token_Q, mask=there_Q & (at_Q < most))
        tl.debug_barrier()  # what other threads of the program have stored is read next


@triton.jit
def rows_of(
    x_LN: tl.tensor, index_Q: tl.tensor, there_Q: tl.tensor, n_N: tl.tensor, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of some tokens (Q, N), zeros beyond."""
    at_QN = index_Q.to(tl.int64)[:, None] * N + n_N[None, :]
    return tl.load(x_LN + at_QN, mask=tl.expand_dims(there_Q, 1) & tl.expand_dims(n_N < N, 0), other=0.0)


@triton.jit
def within(
    first_L: tl.tensor, end_L: tl.tensor, query_Q: tl.tensor, there_Q: tl.tensor, at_W: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Which of the keys at these places of an order each query's stretch holds."""
    first_Q = tl.load(first_L + query_Q, mask=there_Q, other=0)
    end_Q = tl.load(end_L + query_Q, mask=there_Q, other=0)
    return (first_Q[:, None] <= at_W[None, :]) & (at_W[None, :] < end_Q[:, None])


@triton.jit
def visible_pairs(
    query_Q: tl.tensor, there_Q: tl.tensor, key_W: tl.tensor, at_W: tl.tensor, first_RL: tl.tensor,
    end_RL: tl.tensor, until_RS: tl.tensor, other_first_RL: tl.tensor, other_end_RL: tl.tensor,
    other_rank_RS: tl.tensor, row: int, length: int, total: int, KEPT: tl.constexpr, EXCEPT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which pairs of a row this part shows, without those of the first part's stretches; a key of -1 is none."""
    there_W = key_W >= 0
    if KEPT:
        own_Q = query_Q + (total - length)
        until_W = tl.load(until_RS + row * total + key_W, mask=there_W, other=0)
        visible_QW = (key_W[None, :] <= own_Q[:, None]) & (own_Q[:, None] < until_W[None, :])
    else:
        visible_QW = within(first_RL + row * length, end_RL + row * length, query_Q, there_Q, at_W)
    if EXCEPT:
        rank_W = tl.load(other_rank_RS + row * total + key_W, mask=there_W, other=-1)
        shown_QW = within(other_first_RL + row * length, other_end_RL + row * length, query_Q, there_Q, rank_W)
        visible_QW = visible_QW & (shown_QW == 0)
    return visible_QW & there_Q[:, None] & tl.expand_dims(there_W, 0)


@triton.jit
def any_of(true_QW: tl.tensor) -> tl.tensor:
    """Whether one is."""
    return tl.max(tl.max(true_QW.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def run_of_keys(
    first_L: tl.tensor, end_L: tl.tensor, query_Q: tl.tensor, there_Q: tl.tensor, total: int,
) -> tuple:  # fmt: skip
    """Where the stretches of some queries begin and end together; for no keys the end is 0."""
    first_Q = tl.load(first_L + query_Q, mask=there_Q, other=0)
    end_Q = tl.load(end_L + query_Q, mask=there_Q, other=0)
    some_Q = first_Q < end_Q
    return tl.min(tl.where(some_Q, first_Q, total), axis=0), tl.max(tl.where(some_Q, end_Q, 0), axis=0)


@triton.jit
def tile_of_queries(
    queries_RL: tl.tensor, keys: tl.tensor, first_RL: tl.tensor, end_RL: tl.tensor, length: int, total: int,
    width: int, KEPT: tl.constexpr, QUERIES: tl.constexpr,
) -> tuple:  # fmt: skip
    """A program's row and queries, which of these are there, and the keys that it reads: the first, the end, a list."""
    tiles = tl.cdiv(length, QUERIES)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    at_Q = tile * QUERIES + tl.arange(0, QUERIES)
    there_Q = at_Q < length
    query_Q = tl.load(queries_RL + row * length + at_Q, mask=there_Q, other=0)
    begin, stop, listed = 0, width, keys + (row * tiles + tile) * width
    if not KEPT:
        begin, stop = run_of_keys(first_RL + row * length, end_RL + row * length, query_Q, there_Q, total)
        listed = keys + row * total
    return row, query_Q, there_Q, begin, stop, listed


@triton.jit
def with_keys(
    y_QP: tl.tensor, weight_Q: tl.tensor, top_Q: tl.tensor, score_QW: tl.tensor, v_WP: tl.tensor,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """Sums of weights and weighted values with some more keys, and the largest score, which they are relative to."""
    next_Q = tl.maximum(top_Q, tl.max(score_QW, axis=1))
    finite_Q = tl.where(next_Q == float("-inf"), 0.0, next_Q)
    scale_Q, weight_QW = tl.exp(top_Q - finite_Q), tl.exp(score_QW - finite_Q[:, None])
    y_QP = y_QP * scale_Q[:, None] + product(weight_QW, v_WP, PRODUCT, PRECISION)
    return y_QP, weight_Q * scale_Q + tl.sum(weight_QW, axis=1), next_Q


@triton.jit
def masked_scores(
    q_QN: tl.tensor, k_WN: tl.tensor, visible_QW: tl.tensor, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of queries and keys, minus infinity where the key is not seen."""
    return tl.where(visible_QW, product(q_QN, tl.trans(k_WN), PRODUCT, PRECISION), float("-inf"))


@triton.jit
def attend(
    q_RLN: tl.tensor, k_RSN: tl.tensor, v_RSP: tl.tensor, queries_RL: tl.tensor, keys: tl.tensor, first_RL: tl.tensor,
    end_RL: tl.tensor, until_RS: tl.tensor, other_first_RL: tl.tensor, other_end_RL: tl.tensor,
    other_rank_RS: tl.tensor, before_y_RLP: tl.tensor, before_sums_RL: tl.tensor, y_RLP: tl.tensor,
    sums_RL: tl.tensor, length: int, total: int, width: int, most: int, KEPT: tl.constexpr, EXCEPT: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Some values of y and the log-sum-exps of a tile of queries, by one part."""
    row, query_Q, there_Q, begin, stop, listed = tile_of_queries(
        queries_RL, keys, first_RL, end_RL, length, total, width, KEPT, QUERIES
    )
    n_N, p_P = tl.arange(0, BLOCK_N), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    q_QN = rows_of(q_RLN + row * length * N, query_Q, there_Q, n_N, N)
    top_Q, weight_Q = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    y_QP = tl.zeros([QUERIES, VALUES], tl.float32)
    if EXCEPT:
        top_Q = tl.load(before_sums_RL + row * length + query_Q, mask=there_Q, other=float("-inf"))
        weight_Q = tl.where(top_Q == float("-inf"), 0.0, 1.0)
        y_QP = rows_of(before_y_RLP + row * length * P, query_Q, there_Q, p_P, P)
    for start in range(begin, stop, KEYS):
        at_W = start + tl.arange(0, KEYS)
        key_W = tl.load(listed + at_W, mask=at_W < stop, other=-1)
        visible_QW = visible_pairs(
            query_Q, there_Q, key_W, at_W, first_RL, end_RL, until_RS, other_first_RL, other_end_RL, other_rank_RS,
            row, length, total, KEPT, EXCEPT,
        )  # fmt: skip
        if any_of(visible_QW):
            k_WN = rows_of(k_RSN + row * total * N, key_W, key_W >= 0, n_N, N)
            score_QW = masked_scores(q_QN, k_WN, visible_QW, PRODUCT, PRECISION)
            v_WP = rows_of(v_RSP + row * total * P, key_W, key_W >= 0, p_P, P)
            y_QP, weight_Q, top_Q = with_keys(y_QP, weight_Q, top_Q, score_QW, v_WP, PRODUCT, PRECISION)
    whole_Q = tl.where(weight_Q == 0.0, 1.0, weight_Q)
    at_QP = (row * length + query_Q)[:, None] * P + p_P[None, :]
    there_QP = tl.expand_dims(there_Q, 1) & tl.expand_dims(p_P < P, 0)
    tl.store(y_RLP + at_QP, y_QP / whole_Q[:, None], mask=there_QP)
    sums_Q = tl.where(weight_Q == 0.0, float("-inf"), top_Q + tl.log(whole_Q))
    tl.store(sums_RL + row * length + query_Q, sums_Q, mask=there_Q & (tl.program_id(1) == 0))
