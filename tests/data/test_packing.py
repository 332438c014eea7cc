"""Rows against a token-by-token walk over toy documents, in which only eos occurs twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hybridtron.data.folder import TokenFolder
from hybridtron.data.packing import (
    ShuffledWindows,
    Stream,
    gather,
    permutation,
    positions_in_document,
    same_document,
    sequential_rows,
)

EOS = 0
GOLDEN = [
    [7, 3, 0, 1, 4, 2, 5, 6],
    [7, 2, 6, 0, 5, 3, 1, 4],
    [0, 5, 6, 4, 2, 1, 7, 3],
    [0, 7, 4, 2, 6, 3, 1, 5],
]


def windows(toy: TokenFolder, seq_len: int, seed: int = 1) -> ShuffledWindows:
    return ShuffledWindows(toy.lengths("train"), seq_len, seed)


def inputs(toy: TokenFolder, seq_len: int, rows: range, seed: int = 1) -> np.ndarray:
    shuffled = windows(toy, seq_len, seed)
    return gather(toy.tokens("train"), [shuffled.spans(row) for row in rows])[0][:, :-1]


def test_permutation_never_changes():
    """Written down once: the order of a run must survive new versions of numpy and of this file."""
    assert permutation(8, seed=1234, epoch=0, purpose=0).tolist() == GOLDEN[0]
    assert permutation(8, seed=1234, epoch=1, purpose=0).tolist() == GOLDEN[1]
    assert permutation(8, seed=1234, epoch=0, purpose=1).tolist() == GOLDEN[2]
    assert permutation(8, seed=-1, epoch=0, purpose=0).tolist() == GOLDEN[3]


@pytest.mark.parametrize("seq_len", [1, 4, 53, 106, 212])
def test_each_token_is_an_input_once_an_epoch(toy: TokenFolder, seq_len: int):
    tokens = toy.tokens("train")
    rows_per_epoch = len(tokens) // seq_len
    for epoch in range(3):
        rows = range(epoch * rows_per_epoch, (epoch + 1) * rows_per_epoch)
        assert Counter(inputs(toy, seq_len, rows).flat) == Counter(tokens)


@pytest.mark.parametrize("seq_len", [5, 16, 211, 213, 500])
def test_nothing_is_lost_where_an_epoch_is_no_multiple_of_the_row(toy: TokenFolder, seq_len: int):
    """As many epochs as make whole rows: each token as often as there were epochs."""
    tokens = toy.tokens("train")
    epochs = int(np.lcm(len(tokens), seq_len)) // len(tokens)
    rows = range(epochs * len(tokens) // seq_len)
    seen = Counter(inputs(toy, seq_len, rows).flat)
    assert seen == Counter({token: count * epochs for token, count in Counter(tokens.tolist()).items()})


def test_windows_of_an_epoch_are_shuffled_among_themselves(toy: TokenFolder):
    shuffled = windows(toy, 16)  # 212 / 16: windows 0..13 begin in epoch 0, the last reaches into epoch 1
    first = [shuffled.window(row) for row in range(14)]
    assert sorted(first) == list(range(14))
    assert first != sorted(first)
    assert sorted(shuffled.window(row) for row in range(14, 27)) == list(range(14, 27))


def test_every_epoch_has_its_own_order_of_windows(toy: TokenFolder):
    shuffled = windows(toy, 4)  # 53 windows an epoch
    orders = [[shuffled.window(epoch * 53 + row) - epoch * 53 for row in range(53)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_documents_keep_their_order_inside_and_change_it_between_epochs(toy: TokenFolder):
    tokens, lengths = toy.tokens("train"), toy.lengths("train")
    stream = Stream(lengths, seed=5)
    originals = {tuple(d) for d in np.split(tokens, np.cumsum(lengths)[:-1])}
    orders = []
    for epoch in range(3):
        spans = stream.spans(epoch * len(tokens), len(tokens))
        assert {tuple(tokens[s.first : s.first + s.count]) for s in spans} == originals
        orders.append([s.first for s in spans])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_row_is_the_same_whenever_it_is_asked_for(toy: TokenFolder):
    once = inputs(toy, 16, range(100))
    again = windows(toy, 16)
    for row in (99, 0, 50, 13, 14, 98):
        np.testing.assert_array_equal(gather(toy.tokens("train"), [again.spans(row)])[0][0, :-1], once[row])


def test_the_seed_changes_the_order(toy: TokenFolder):
    assert not np.array_equal(inputs(toy, 16, range(13), seed=1), inputs(toy, 16, range(13), seed=2))


@pytest.mark.parametrize("seq_len", [3, 16, 70, 300])
def test_borders_against_a_walk_over_the_tokens(toy: TokenFolder, seq_len: int):
    """A new document begins behind each eos, and nowhere else; the label of an eos belongs to the next document."""
    shuffled = windows(toy, seq_len)
    tokens_BT, documents_BT = gather(toy.tokens("train"), [shuffled.spans(row) for row in range(60)])
    mask_BL, positions_BL = same_document(documents_BT), positions_in_document(documents_BT[:, :-1])
    assert mask_BL.shape == positions_BL.shape == (60, seq_len)
    for row in range(60):
        document = position = 0
        for place in range(seq_len):
            token, label = tokens_BT[row, place], tokens_BT[row, place + 1]
            assert documents_BT[row, place] == document
            assert positions_BL[row, place] == position
            assert mask_BL[row, place] == (token != EOS)
            if token == EOS:
                document, position = document + 1, 0
            else:
                position += 1
                assert label in (token + 1, EOS)


def test_a_document_that_follows_itself_is_a_new_one():
    """With one document an epoch, the end of an epoch is still a border."""
    stream = Stream(np.array([4]), seed=0)
    _, documents_BT = gather(np.array([1, 2, 3, 0]), [stream.spans(2, 8)])
    assert documents_BT.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2]]


def test_every_label_within_a_document_counts_once_an_epoch(toy: TokenFolder):
    shuffled = windows(toy, 53)
    _, documents_BT = gather(toy.tokens("train"), [shuffled.spans(row) for row in range(4)])
    assert same_document(documents_BT).sum() == len(toy.tokens("train")) - len(toy.lengths("train"))


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (9, 1), (25, 2), (10**9, 21)])
def test_sequential_rows_are_the_start_of_the_split(toy: TokenFolder, tokens: int, rows: int):
    stored = toy.tokens("train")
    tokens_BT, _ = gather(stored, sequential_rows(toy.lengths("train"), 10, tokens))
    np.testing.assert_array_equal(tokens_BT[:, :-1].reshape(-1), stored[: rows * 10])
    np.testing.assert_array_equal(tokens_BT[:, -1], stored[10 : rows * 10 + 1 : 10])


def test_sequential_rows_need_one_row(toy: TokenFolder):
    with pytest.raises(ValueError, match="212 tokens do not make one row of seq_len=212"):
        sequential_rows(toy.lengths("train"), 212, 1)
