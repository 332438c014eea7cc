"""Triton kernels for the forward pass of sparse attention.

In sparse attention, rules select the keys that a query sees: the recent, first or strided keys, the keys in the query's
hash bin, or the keys with the best scores. A part is the pairs (query, key) that one rule selects. There are at most
two parts. Integers per token decide which pairs are in a part, so no matrix over all pairs is stored. There are two
kinds of parts:

    stretch  keys are sorted, and a query sees the keys at positions `first` to `end` - 1 in the sorted list
    kept     a key is seen by the queries from its own token to the token `until` - 1; from the token `until` on, the
             key is no longer among the best keys; it never returns, since the number of better keys only grows

There are two kernels. `best_keys` computes `until`. `attend` computes the attention over one part; a program computes a
tile with QUERIES queries. For a stretch, queries are sorted by `end`. In that order `first` ascends too, so the keys
that a tile's queries see are one range in the sorted list. Let `most` be the maximum number of keys that a query sees.
Then the ranges of a row's T tiles have at most S + `most` * T keys in total. For the kept part, each tile has a list of
keys: the best keys before the tile, and the tile's own keys.

The launch for a second part continues from the first part's outputs and log-sum-exps, and skips the pairs that are in
the first part (EXCEPT).

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (remembered keys of the
row's first document, then the row's L keys), N key size, P value size, T query tiles, Q queries in a tile, W keys in a
tile, K best keys in a list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridtron.ops.ssd.kernels_forward import product


@triton.jit
def better(
    document: tl.tensor, score: tl.tensor, other_document: tl.tensor, other_score: tl.tensor, earlier: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return True where a key is better than the other key.

    A key in a later document is better. In one document, the key with the larger score is better; if scores are equal,
    the earlier key is better. `earlier` is True where the key is before the other key.
    """
    same_score = (score == other_score) & earlier
    return (document > other_document) | ((document == other_document) & ((score > other_score) | same_score))


@triton.jit
def token_rank(documents_S: tl.tensor, scores_S: tl.tensor, index: tl.tensor, there: tl.tensor) -> tuple:
    """Return the document indices and the scores of some tokens; masked tokens get document -1."""
    return tl.load(documents_S + index, mask=there, other=-1), tl.load(scores_S + index, mask=there, other=0.0)


@triton.jit
def best_keys(
    documents_RS: tl.tensor, scores_RS: tl.tensor, until_RS: tl.tensor, lists_RTK: tl.tensor, total: int, past: int,
    before: int, tiles: int, most: int, QUERIES: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store each key's `until`, and for each tile a list with the best `most` keys before it. Grid: rows.

    A list is sorted, with the best key first. So a key's position in the list is the number of better keys. Each tile's
    list is computed from the previous tile's list and the previous tile's own keys. The first `before` tiles contain
    remembered keys; the following tiles are the query tiles.
    """
    row = tl.program_id(0).to(tl.int64)
    documents_RS = documents_RS + row * total
    scores_RS = scores_RS + row * total
    until_RS = until_RS + row * total
    lists_RTK += row * (before + tiles + 1) * most
    slot_K = tl.arange(0, SLOTS)
    place_Q = tl.arange(0, QUERIES)
    for tile in range(before + tiles):
        index_K = tl.load(lists_RTK + tile * most + slot_K, mask=slot_K < most, other=-1)
        filled_K = index_K >= 0
        document_K, score_K = token_rank(documents_RS, scores_RS, index_K, filled_K)
        token_Q = past + (tile - before) * QUERIES + place_Q
        there_Q = (token_Q >= 0) & (token_Q < total)
        document_Q, score_Q = token_rank(documents_RS, scores_RS, token_Q, there_Q)
        there_Q = there_Q & (document_Q >= 0)
        never = slot_K[:, None] < 0
        # over_KQ[k, q]: key q of the tile is better than key k of the list; a key of the list is always earlier
        over_KQ = better(document_Q[None, :], score_Q[None, :], document_K[:, None], score_K[:, None], never)
        over_KQ = (over_KQ & filled_K[:, None] & there_Q[None, :]).to(tl.int32)
        # lives_K[k]: number of the tile's queries for which key k of the list is still among the best
        lives_K = tl.sum((slot_K[:, None] + tl.cumsum(over_KQ, axis=1) < most).to(tl.int32), axis=1)
        tl.store(until_RS + index_K, past + (tile - before) * QUERIES + lives_K, mask=filled_K)
        # over_QQ[i, j]: key i of the tile is better than key j of the tile
        over_QQ = better(
            document_Q[:, None], score_Q[:, None], document_Q[None, :], score_Q[None, :],
            place_Q[:, None] < place_Q[None, :],
        )  # fmt: skip
        over_QQ = (over_QQ & there_Q[:, None]).to(tl.int32)
        # behind_Q[j]: number of keys in the list that are better than key j of the tile
        # kept_QQ[i, j]: query i of the tile sees key j of the tile
        behind_Q = tl.sum(filled_K.to(tl.int32), axis=0) - tl.sum(over_KQ, axis=0)
        kept_QQ = (behind_Q[None, :] + tl.cumsum(over_QQ, axis=0) < most) & (place_Q[:, None] >= place_Q[None, :])
        tl.store(until_RS + token_Q, token_Q + tl.sum(kept_QQ.to(tl.int32), axis=0), mask=there_Q)
        # at_K, at_Q: positions in the next tile's list, for the keys of this list and for the tile's own keys
        at_K = slot_K + tl.sum(over_KQ, axis=1)
        at_Q = behind_Q + tl.sum(over_QQ, axis=0)
        after = lists_RTK + (tile + 1) * most
        tl.store(after + at_K, index_K, mask=filled_K & (at_K < most))
        tl.store(after + at_Q, token_Q, mask=there_Q & (at_Q < most))
        tl.debug_barrier()  # the next iteration reads entries that other threads have stored


@triton.jit
def rows_of(
    x_LN: tl.tensor, index_Q: tl.tensor, there_Q: tl.tensor, n_N: tl.tensor, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load x at some tokens, as a tile (Q, N); entries out of range are 0."""
    at_QN = index_Q.to(tl.int64)[:, None] * N + n_N[None, :]
    return tl.load(x_LN + at_QN, mask=tl.expand_dims(there_Q, 1) & tl.expand_dims(n_N < N, 0), other=0.0)


@triton.jit
def within(
    first_L: tl.tensor, end_L: tl.tensor, query_Q: tl.tensor, there_Q: tl.tensor, at_W: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a mask (Q, W), True where a key is in the query's range; `at_W` are positions in the sorted list."""
    first_Q = tl.load(first_L + query_Q, mask=there_Q, other=0)
    end_Q = tl.load(end_L + query_Q, mask=there_Q, other=0)
    return (first_Q[:, None] <= at_W[None, :]) & (at_W[None, :] < end_Q[:, None])


@triton.jit
def visible_pairs(
    query_Q: tl.tensor, there_Q: tl.tensor, key_W: tl.tensor, at_W: tl.tensor, first_RL: tl.tensor,
    end_RL: tl.tensor, until_RS: tl.tensor, other_first_RL: tl.tensor, other_end_RL: tl.tensor,
    other_rank_RS: tl.tensor, row: int, length: int, total: int, KEPT: tl.constexpr, EXCEPT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a mask (Q, W) for the pairs in this part; with EXCEPT, pairs in the first part are excluded.

    Key index -1 is padding. The arguments whose names begin with `other_` belong to the first part.
    """
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
    """Return True if any entry of the mask is True."""
    return tl.max(tl.max(true_QW.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def run_of_keys(
    first_L: tl.tensor, end_L: tl.tensor, query_Q: tl.tensor, there_Q: tl.tensor, total: int,
) -> tuple:  # fmt: skip
    """Return the begin and end of the smallest range with all keys that these queries see.

    Begin and end are positions among the sorted keys. If the queries see no key, the end is 0.
    """
    first_Q = tl.load(first_L + query_Q, mask=there_Q, other=0)
    end_Q = tl.load(end_L + query_Q, mask=there_Q, other=0)
    some_Q = first_Q < end_Q
    return tl.min(tl.where(some_Q, first_Q, total), axis=0), tl.max(tl.where(some_Q, end_Q, 0), axis=0)


@triton.jit
def tile_of_queries(
    queries_RL: tl.tensor, keys: tl.tensor, first_RL: tl.tensor, end_RL: tl.tensor, length: int, total: int,
    width: int, KEPT: tl.constexpr, QUERIES: tl.constexpr,
) -> tuple:  # fmt: skip
    """Return a program's row, its queries, a mask for valid queries, and the keys to read.

    The keys to read are given by three values: the entries `begin` to `stop` - 1 of the list `listed`.
    """
    tiles = tl.cdiv(length, QUERIES)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    at_Q = tile * QUERIES + tl.arange(0, QUERIES)
    there_Q = at_Q < length
    query_Q = tl.load(queries_RL + row * length + at_Q, mask=there_Q, other=0)
    begin = 0
    stop = width
    listed = keys + (row * tiles + tile) * width
    if not KEPT:
        begin, stop = run_of_keys(first_RL + row * length, end_RL + row * length, query_Q, there_Q, total)
        listed = keys + row * total
    return row, query_Q, there_Q, begin, stop, listed


@triton.jit
def with_keys(
    y_QP: tl.tensor, weight_Q: tl.tensor, top_Q: tl.tensor, score_QW: tl.tensor, v_WP: tl.tensor,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple:  # fmt: skip
    """Add a key tile to an online softmax.

    Return its updated state: the sum of weighted values, the sum of weights, and the largest score.
    """
    next_Q = tl.maximum(top_Q, tl.max(score_QW, axis=1))
    finite_Q = tl.where(next_Q == float("-inf"), 0.0, next_Q)
    scale_Q = tl.exp(top_Q - finite_Q)
    weight_QW = tl.exp(score_QW - finite_Q[:, None])
    y_QP = y_QP * scale_Q[:, None] + product(weight_QW, v_WP, PRODUCT, PRECISION)
    return y_QP, weight_Q * scale_Q + tl.sum(weight_QW, axis=1), next_Q


@triton.jit
def masked_scores(
    q_QN: tl.tensor, k_WN: tl.tensor, visible_QW: tl.tensor, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scores q . k, with minus infinity for invisible pairs."""
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
    """Store VALUES channels of y, and the log-sum-exps, for a query tile and one part.

    Grid: (rows * query tiles, slices with VALUES channels). Key tiles without a visible pair are skipped.
    `queries_RL` are the sorted queries. `keys` are the sorted keys of a stretch, or the kept part's lists for each
    query tile.
    """
    row, query_Q, there_Q, begin, stop, listed = tile_of_queries(
        queries_RL, keys, first_RL, end_RL, length, total, width, KEPT, QUERIES
    )
    n_N = tl.arange(0, BLOCK_N)
    p_P = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    q_QN = rows_of(q_RLN + row * length * N, query_Q, there_Q, n_N, N)
    top_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    weight_Q = tl.zeros([QUERIES], tl.float32)
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
