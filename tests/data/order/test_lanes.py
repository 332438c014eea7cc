"""Lanes against whole documents: a recurrence whose state is carried from row to row must not notice the rows."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridtron.data.order.lanes import Lanes
from hybridtron.data.order.stream import DocumentStream, RowSpans

MODULUS = 1_000_003
GOLDEN = [[0, 4, 0, 1, 1, 6], [5, 3, 4, 1], [2, 6, 3, 1, 5]]


def stream(lengths: Sequence[int], shuffle_tokens: int = 40, seed: int | None = 3) -> DocumentStream:
    shards = np.array_split(np.array(lengths), max(1, -(-len(lengths) // 5)))
    source = SimpleNamespace(
        lengths=np.array(lengths, dtype=np.uint32),
        shard_documents=np.array([len(s) for s in shards]),
        shard_tokens=np.array([int(s.sum()) for s in shards]),
    )
    return DocumentStream(source, shuffle_tokens, seed)


def toy_lengths(documents: int, longest: int = 60, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest, documents).tolist()


def token(source: int, document: int, place: int) -> int:
    return (source * 7919 + document * 104729 + place * 31 + (document * place) % 17) % 1009


def step_of(state: int, value: int) -> int:
    return (31 * state + value + 1) % MODULUS


@functools.cache
def whole(source: int, document: int, length: int) -> list[int]:
    """The recurrence's states over a whole document."""
    states = []
    state = 0
    for place in range(length):
        state = step_of(state, token(source, document, place))
        states.append(state)
    return states


def places(row: RowSpans) -> list[tuple[int, int, int]]:
    """(source, document, place in it) of each token."""
    return [(source, s.document, place) for source, s in row.spans for place in range(s.first, s.first + s.count)]


def walk(lanes: Lanes, lane: int, steps: int) -> list[tuple[int, int, int]]:
    """The lane's tokens, its rows checked: each begins with the last token of the one before and says so."""
    tokens: list[tuple[int, int, int]] = []
    for step in range(steps):
        row = lanes.row(lane, step)
        row_places = places(row)
        assert (row.position > 0) == (row_places[0][2] > 0)
        assert not tokens or tokens[-1] == row_places[0]
        tokens += row_places[1:] if tokens else row_places
    return tokens


def documents(tokens: list[tuple[int, int, int]], lengths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the documents that end in a lane. Each must be complete and follow the one before."""
    ended = []
    before = None
    for source, document, place in tokens:
        if place == 0:
            assert before is None or before[2] == lengths[before[0]][before[1]] - 1
        else:
            assert before == (source, document, place - 1)
        before = (source, document, place)
        if place == lengths[source][document] - 1:
            ended.append((source, document))
    return ended


def test_lane_order_equals_the_golden_order():
    lanes = Lanes([stream([3, 1, 4, 1, 5, 9, 2]), stream([6, 5, 3], seed=4)], [2, 1], 3, 16, 30, seed=7)
    assert [[s.document for _, s in lanes.row(lane, 0).spans] for lane in range(3)] == GOLDEN


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=25), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 17),
    st.integers(1, 300),
)
@example([[1], [40]], 9, 1, 1)
@example([toy_lengths(25)], 40, 16, 10**9)
def test_a_round_deals_every_document_once(lengths: list[list[int]], lanes: int, seq_len: int, shuffle_tokens: int):
    """A round has every document in its part of each stream once, and a lane is its pieces, one after another."""
    streams = [stream(stream_lengths, shuffle_tokens, seed) for seed, stream_lengths in enumerate(lengths)]
    weights = {1: [3], 2: [1, 7], 3: [4, 1, 3]}[len(streams)]  # shares that 2**-60 divides
    round_tokens = min(shuffle_tokens, sum(map(sum, lengths)))
    dealt = Lanes(streams, weights, lanes, seq_len, shuffle_tokens, seed=1)
    steps = 120 // seq_len + 1
    walked = [documents(walk(dealt, lane, steps), lengths) for lane in range(lanes)]
    rounds = max(dealt._round_at(lane, steps * seq_len) for lane in range(lanes))
    laid: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
    for number in range(rounds + 1):
        pieces = [list(zip(*(a.tolist() for a in dealt._part(lane, number)[:2]), strict=True)) for lane in range(lanes)]
        expected = []
        for source, weight in enumerate(weights):
            edges = [streams[source].boundary(weight * m * round_tokens // sum(weights)) for m in (number, number + 1)]
            expected += [(source, document) for document in streams[source].documents(edges[0], edges[1])[0].tolist()]
        assert sorted(itertools.chain(*pieces)) == sorted(expected)
        for lane, piece in zip(laid, pieces, strict=True):
            lane += piece
    for lane, seen in zip(laid, walked, strict=True):
        assert lane[: len(seen)] == seen


@pytest.mark.parametrize("lanes", [1, 2, 40])
def test_a_round_of_one_source_is_an_epoch(lanes: int):
    lengths = toy_lengths(90)
    dealt = Lanes([stream(lengths, 10**9)], [1], lanes, 16, 10**9, seed=1)
    assert dealt.row(0, 3 * sum(lengths) // lanes // 16)
    for epoch in range(3):
        epoch_documents = [document for lane in range(lanes) for document in dealt._part(lane, epoch).numbers.tolist()]
        assert sorted(epoch_documents) == list(range(90))


@pytest.mark.parametrize(
    ("lengths", "weights", "lanes"),
    [
        ([toy_lengths(60)], [1.0], 4),
        ([toy_lengths(60), toy_lengths(9, 200, 1), [1, 1, 2]], [0.6, 0.3, 0.1], 5),
        ([toy_lengths(30), [900]], [0.5, 0.5], 3),
        ([[50]], [1.0], 2),
    ],
)
def test_carried_states_equal_those_of_whole_documents(lengths: list[list[int]], weights: list[float], lanes: int):
    """Check every token of several epochs: states are reset where a document starts, and carried where a row continues
    it.
    """
    dealt = Lanes(
        [stream(stream_lengths, seed=i) for i, stream_lengths in enumerate(lengths)], weights, lanes, 16, 500, seed=1
    )
    tokens_seen = 0
    for lane in range(lanes):
        state = 0
        for step in range(sum(map(sum, lengths)) // 16 + 1):
            row = dealt.row(lane, step)
            if not (row.position > 0):
                state = 0
            inputs = places(row)[:-1]
            assert len(inputs) == 16
            for index, (source, document, place) in enumerate(inputs):
                if place == 0 and index > 0:
                    state = 0
                state = step_of(state, token(source, document, place))
                assert state == whole(source, document, lengths[source][document])[place]
                tokens_seen += 1
    assert tokens_seen >= lanes * sum(map(sum, lengths))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("shuffle_tokens", [3, 10**9])
@pytest.mark.parametrize("lengths", [[50], [50, 20, 30], [4] * 5])
def test_lanes_without_enough_documents_are_all_fed(lengths: list[int], shuffle_tokens: int, seed: int | None):
    """Every lane is fed, and all of them move at one pace, even where rounds hold one document or none."""
    dealt = Lanes([stream(lengths, 60, seed)], [1], 10, 16, shuffle_tokens, seed=1)
    counts = Counter()
    for lane in range(10):
        ended = documents(walk(dealt, lane, 12), [lengths])
        assert sum(lengths[document] for _, document in ended) >= 192 - max(lengths)
        counts += Counter(document for _, document in ended)
    assert max(counts.values()) - min(counts.values()) <= 0.2 * max(counts.values()) + 10


def rounds_apart(dealt: Lanes, lanes: int, step: int) -> int:
    """The largest difference between the rounds that the lanes are in."""
    rounds = [dealt._round_at(lane, step * 16) for lane in range(lanes)]
    return max(rounds) - min(rounds)


def test_lanes_catch_up_after_a_giant_document():
    """While one lane walks the giant, the others get all the rest; behind it all are together again."""
    lengths = [*toy_lengths(3000, 20), 5000]
    dealt = Lanes([stream(lengths, 400)], [1], 8, 16, 400, seed=1)
    apart = [rounds_apart(dealt, 8, step) for step in range(2 * sum(lengths) // 8 // 16)]
    assert max(apart) > 20
    assert min(apart) == 0
    assert np.mean(np.array(apart) <= 1) > 0.2
    ended = [documents(walk(dealt, lane, len(apart)), [lengths]) for lane in range(8)]
    giants = Counter(document for lane in ended for _, document in lane)[3000]
    assert giants in (1, 2)


def test_lanes_of_ordinary_documents_stay_together():
    dealt = Lanes([stream(toy_lengths(3000))], [1], 16, 16, 4000, seed=1)
    assert max(rounds_apart(dealt, 16, step) for step in range(0, 2000, 3)) <= 1


def test_shares_of_the_sources_are_their_weights():
    lengths = [toy_lengths(200), toy_lengths(40, 100, 1), toy_lengths(5, 30, 2)]
    weights = [0.7, 0.25, 0.05]
    dealt = Lanes(
        [stream(stream_lengths, seed=i) for i, stream_lengths in enumerate(lengths)], weights, 8, 32, 2000, seed=1
    )
    counts = np.zeros(3)
    for step in range(300):
        for lane in range(8):
            for source, span in dealt.row(lane, step).spans:
                counts[source] += span.count
        if step >= 30:
            assert np.abs(counts - counts.sum() * np.array(weights)).max() < 8 * 100  # a document a lane
    np.testing.assert_allclose(counts / counts.sum(), weights, atol=0.005)


def test_sources_are_interleaved_within_a_round():
    lengths = [[10] * 300, [10] * 100]
    dealt = Lanes(
        [stream(stream_lengths, seed=i) for i, stream_lengths in enumerate(lengths)], [3, 1], 1, 10, 4000, seed=1
    )
    sources = [source for source, _, place in walk(dealt, 0, 400) if place == 0]
    assert {sum(sources[i : i + 40]) for i in range(0, 400, 40)} == {10}


def test_a_lane_row_does_not_depend_on_earlier_calls():
    def fresh() -> Lanes:
        return Lanes([stream(toy_lengths(60)), stream(toy_lengths(9, 200, 1))], [0.7, 0.3], 4, 16, 500, seed=1)

    lanes = fresh()
    rows = {(lane, step): lanes.row(lane, step) for step in range(100) for lane in range(4)}
    asked = list(rows)
    np.random.default_rng(0).shuffle(asked)
    again = fresh()
    assert all(again.row(lane, step) == rows[lane, step] for lane, step in asked)
    assert fresh().row(3, 99) == rows[3, 99]


def test_the_seed_changes_the_documents_of_lanes():
    source = stream(toy_lengths(60))
    rows = [[Lanes([source], [1], 8, 16, 500, seed=seed).row(lane, 0) for lane in range(8)] for seed in (1, 2)]
    assert rows[0] != rows[1]


def test_impossible_lanes_are_refused():
    with pytest.raises(ValueError, match="1 streams but 2 weights"):
        Lanes([stream([5])], [1, 1], 2, 16, 500, seed=1)
    with pytest.raises(ValueError, match="shuffle_tokens is 0"):
        Lanes([stream([5])], [1], 2, 16, 0, seed=1)
    with pytest.raises(ValueError, match=r"weights\[1\] is 0"):
        Lanes([stream([5]), stream([6])], [1, 0], 2, 16, 500, seed=1)
    with pytest.raises(ValueError, match="no documents"):
        Lanes([stream([])], [1], 2, 16, 500, seed=1)
