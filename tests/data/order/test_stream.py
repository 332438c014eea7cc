"""The order of documents and windows: each token once an epoch, and few shards at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtron.data.order.stream import DocumentStream, Span, cut, permutation
from hybridtron.data.order.windows import ShuffledWindows

GOLDEN_PERMUTATION = [[5, 2, 4, 1, 0, 6, 3, 7], [7, 5, 1, 3, 0, 2, 6, 4]]
GOLDEN_STREAM = [[0, 4, 1, 6, 2, 3, 7, 5], [1, 5, 0, 7, 6, 2, 3, 4]]
GOLDEN_WINDOWS = [2, 3, 0, 1, 4, 6, 7, 5, 10, 9, 8, 11, 13, 15, 14, 12]


class Source(NamedTuple):
    """Documents in shards."""

    lengths: np.ndarray
    shard_documents: np.ndarray
    shard_tokens: np.ndarray

    def stream(self, shuffle_tokens: int, seed: int | None) -> DocumentStream:
        return DocumentStream(self, shuffle_tokens, seed)

    def shard_of(self, document: int) -> int:
        return int(np.searchsorted(np.cumsum(self.shard_documents), document, side="right"))

    def tokens_of(self, spans: list[Span]) -> list[int]:
        """Return each token as its number in the source."""
        firsts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return [int(firsts[s.document]) + s.first + i for s in spans for i in range(s.count)]


def source(shards: list[list[int]]) -> Source:
    lengths = np.array([length for shard in shards for length in shard], dtype=np.uint32)
    return Source(lengths, np.array([len(s) for s in shards]), np.array([sum(s) for s in shards]))


def random_source(shards: int = 20, documents: int = 30, seed: int = 0) -> Source:
    rng = np.random.default_rng(seed)
    return source([rng.integers(1, 20, documents).tolist() for _ in range(shards)])


sources = (
    st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=7)
    .filter(lambda s: sum(map(len, s)))
    .map(source)
)
properties = settings(max_examples=40, derandomize=True, deadline=None)


def test_stream_order_equals_the_golden_order():
    """Written down once: the order of a run must survive new versions of numpy and of these files."""
    assert permutation(8, 1234, "shards", 0).tolist() == GOLDEN_PERMUTATION[0]
    assert permutation(8, -1, "documents", 2**40, 3).tolist() == GOLDEN_PERMUTATION[1]
    toy = source([[3, 1], [2, 2], [], [4], [1, 1, 2]])
    stream = toy.stream(5, 7)
    for epoch in (0, 1):
        assert [s.document for s in stream.spans(epoch * 16, 16)] == GOLDEN_STREAM[epoch]
    windows = ShuffledWindows(stream, 2, 8, 7)
    assert [windows.window(row) for row in range(16)] == GOLDEN_WINDOWS


@properties
@given(sources, st.integers(1, 60), st.integers(0, 99))
def test_an_epoch_is_every_document_once_and_whole(toy: Source, shuffle_tokens: int, seed: int):
    stream = toy.stream(shuffle_tokens, seed)
    tokens = stream.tokens_per_epoch
    assert tokens == toy.lengths.sum()
    for epoch in range(3):
        spans = stream.spans(epoch * tokens, tokens)
        assert sorted(spans) == [Span(i, 0, length) for i, length in enumerate(toy.lengths.tolist())]


@properties
@given(sources, st.integers(1, 60), st.integers(1, 20), st.sampled_from([None, 0, 1]))
def test_each_token_is_an_input_once_an_epoch(toy: Source, shuffle_tokens: int, seq_len: int, seed: int | None):
    """Read enough epochs to fill complete rows; then the windows of the last epoch are all read too."""
    windows = ShuffledWindows(toy.stream(shuffle_tokens, seed), seq_len, shuffle_tokens, seed)
    total = int(toy.lengths.sum())
    seen = np.zeros(total, dtype=int)
    for row in range(total):
        spans = windows.spans(row)
        tokens = toy.tokens_of(spans)
        assert len(tokens) == seq_len + 1
        np.add.at(seen, tokens[:-1], 1)
    assert (seen == seq_len).all()


@properties
@given(sources, st.integers(1, 60), st.integers(1, 9))
def test_windows_follow_the_stream(toy: Source, shuffle_tokens: int, seq_len: int):
    stream = toy.stream(shuffle_tokens, 3)
    windows = ShuffledWindows(stream, seq_len, shuffle_tokens, 3)
    endless = toy.tokens_of(stream.spans(0, 4 * int(toy.lengths.sum()) + 40))
    for row in range(2 * int(toy.lengths.sum()) // seq_len):
        first = windows.window(row) * seq_len
        assert toy.tokens_of(windows.spans(row)) == endless[first : first + seq_len + 1]


@pytest.mark.parametrize("shuffle_tokens", [1, 300, 1000, 2500])
def test_blocks_are_made_of_whole_shards(shuffle_tokens: int):
    toy = random_source()
    stream = toy.stream(shuffle_tokens, 5)
    largest = int(toy.shard_tokens.max())
    order = [s.document for s in stream.spans(0, stream.tokens_per_epoch)]
    left = toy.shard_documents.copy()
    blocks = []
    current = set()
    tokens = 0
    for document in order:
        shard = toy.shard_of(document)
        current.add(shard)
        left[shard] -= 1
        tokens += int(toy.lengths[document])
        if tokens >= shuffle_tokens and not left[list(current)].any():
            blocks.append(tokens)
            current = set()
            tokens = 0
    rest = [tokens] if tokens else []
    assert all(shuffle_tokens <= block < shuffle_tokens + largest for block in blocks[:-1])
    assert blocks[-1] < 1.5 * shuffle_tokens + largest
    assert all(2 * tokens >= shuffle_tokens for tokens in rest)
    assert len(blocks) + len(rest) >= stream.tokens_per_epoch // (1.5 * shuffle_tokens + largest)


def test_few_shards_are_in_use_at_a_time():
    toy = random_source(shards=40)
    stream = toy.stream(1000, 5)
    windows = ShuffledWindows(stream, 16, 1000, 5)
    in_block = 1500 // int(toy.shard_tokens.min()) + 1
    for row in range(0, 3 * stream.tokens_per_epoch // 16, 10):
        used = {toy.shard_of(s.document) for r in range(row, row + 30) for s in windows.spans(r)}
        assert len(used) <= 4 * in_block < 40


def test_documents_are_mixed_over_the_shards_of_a_block():
    toy = random_source()
    everything = toy.stream(10**9, 5)
    shards = [toy.shard_of(s.document) for s in everything.spans(0, everything.tokens_per_epoch)]
    assert len(set(shards[:60])) > 15
    assert shards != sorted(shards)


def test_without_a_seed_the_order_is_that_of_the_files():
    toy = source([[3, 1], [], [2, 2], [4]])
    stream = toy.stream(5, None)
    assert toy.tokens_of(stream.spans(0, 24)) == [*range(12), *range(12)]
    windows = ShuffledWindows(stream, 5, 10, None)
    assert [windows.window(row) for row in range(9)] == list(range(9))
    assert toy.tokens_of(windows.spans(2)) == [10, 11, 0, 1, 2, 3]


@pytest.mark.parametrize("shuffle_tokens", [300, 10**9])
def test_every_seed_and_epoch_has_its_own_order(shuffle_tokens: int):
    toy = random_source()
    tokens = int(toy.lengths.sum())
    orders = set()
    windows = set()
    for seed in range(3):
        stream = toy.stream(shuffle_tokens, seed)
        shuffled = ShuffledWindows(stream, tokens // 50, shuffle_tokens * 4, seed)
        for epoch in range(3):
            orders.add(tuple(s.document for s in stream.spans(epoch * tokens, tokens)))
            first = -(-epoch * tokens // (tokens // 50))
            windows.add(tuple(shuffled.window(first + row) - first for row in range(50)))
    assert len(orders) == len(windows) == 9


@properties
@given(sources, st.integers(1, 60), st.permutations(range(40)))
def test_a_window_does_not_depend_on_earlier_calls(toy: Source, shuffle_tokens: int, asked: list[int]):
    def fresh() -> ShuffledWindows:
        return ShuffledWindows(toy.stream(shuffle_tokens, 1), 5, shuffle_tokens, 1)

    windows = fresh()
    rows = [windows.spans(row) for row in range(40)]
    again = fresh()
    assert [again.spans(row) for row in asked] == [rows[row] for row in asked]
    assert fresh().spans(asked[0]) == rows[asked[0]]


@properties
@given(sources, st.integers(1, 60), st.sampled_from([None, 4]), st.integers(0, 200), st.integers(0, 200))
def test_documents_between_boundaries_are_those_of_a_walk(
    toy: Source, shuffle_tokens: int, seed: int | None, begin: int, more: int
):
    stream = toy.stream(shuffle_tokens, seed)
    walk = []
    starts = []
    position = 0
    while position < begin + more + 20:
        (span,) = stream.spans(position, 1)
        walk.append((span.document, int(toy.lengths[span.document])))
        starts.append(position)
        position += walk[-1][1]
    left = next(i for i, start in enumerate(starts) if start >= begin)
    right = next(i for i, start in enumerate(starts) if start >= begin + more)
    assert (stream.boundary(begin), stream.boundary(begin + more)) == (starts[left], starts[right])
    documents, lengths = stream.documents(starts[left], starts[right])
    assert documents.dtype == lengths.dtype == np.int64
    assert list(zip(documents.tolist(), lengths.tolist(), strict=True)) == walk[left:right]


def test_cut_ends_with_the_last_document():
    assert cut(np.array([7, 9]), np.array([3, 5]), 2, 9) == [Span(7, 2, 1), Span(9, 0, 2)]


def test_a_repeated_document_starts_a_new_span():
    assert source([[4]]).stream(9, 0).spans(2, 8) == [Span(0, 2, 2), Span(0, 0, 4), Span(0, 0, 2)]


def test_shards_that_disagree_with_lengths_are_refused():
    with pytest.raises(ValueError, match="no documents"):
        source([[], []]).stream(5, 0)
    with pytest.raises(ValueError, match="add up to 6 tokens, but its shards have 7"):
        Source(np.array([1, 2, 3]), np.array([3]), np.array([7])).stream(5, 0).spans(0, 1)
