"""Sparse attention: the reference against loops that are written from the paper, tiles against the reference, and rows
that are cut anywhere against whole ones."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.sparse import (
    Budget,
    Seen,
    SparseInputs,
    SparseKeys,
    SparseMemory,
    hash_bins,
    hash_matrix,
    joined,
    remember,
    sparse_attention,
)
from hybridtron.ops.sparse.parts import TILE, parts_of
from hybridtron.ops.sparse.reference import visible_keys

PATTERNS = {
    "window": Budget(recent=6),
    "dilated": Budget(strided=5, stride=3),
    "window_dilated": Budget(recent=4, strided=3, stride=4),
    "sink_window": Budget(recent=4, first=3),
    "lsh": Budget(bin=4),
    "ks": Budget(best=5),
    "hax": Budget(bin=3, best=4),
    "all": Budget(recent=2, first=2, strided=2, bin=2, best=2, stride=3),
}
HASHES = 3
SIZE = 4
VALUES = 3
MATRIX = hash_matrix(5, SIZE, HASHES, torch.device("cpu"))


class Row(NamedTuple):
    """A mixer's tensors: queries, keys and values, scores, and documents that count up."""

    q_RLN: Tensor
    k_RLN: Tensor
    v_RLP: Tensor
    scores_RL: Tensor
    documents_RL: Tensor

    def part(self, start: int, stop: int) -> Row:
        return Row(*(x[:, start:stop] for x in self))


def random_row(length: int, rows: int = 2, borders: float = 0.0, ties: bool = False) -> Row:
    """Return a random row. With ties many scores are equal, and so are many keys and queries."""
    q, k, v = (torch.randn(rows, length, size, dtype=torch.float64) for size in (SIZE, SIZE, VALUES))
    scores = torch.randn(rows, length, dtype=torch.float64)
    if ties:
        q, k, scores = (x.mul(1.5).round() for x in (q, k, scores))
    documents = (torch.rand(rows, length) < borders).cumsum(1)
    return Row(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), scores, documents)


def slots_of(budget: Budget) -> int:
    recent = max(budget.recent - 1, 0)
    return recent + budget.first + budget.strided + budget.best + 2**HASHES * budget.bin


def places_of(documents_RL: Tensor) -> Tensor:
    first_RL = torch.searchsorted(documents_RL.contiguous(), documents_RL.contiguous())
    return torch.arange(documents_RL.shape[1]) - first_RL


def bins_of(x_RSN: Tensor, documents_RS: Tensor, budget: Budget) -> Tensor | None:
    if not budget.bin:
        return None
    return hash_bins(x_RSN.detach(), documents_RS, MATRIX, "sign", "features")


def attend(row: Row, budget: Budget, memory: SparseMemory | None = None) -> tuple[Tensor, SparseMemory]:
    """Attend as a mixer does: read the memory before the row, and return the memory for later rows."""
    places_RL = places_of(row.documents_RL)
    keys = SparseKeys(row.k_RLN, row.v_RLP, row.documents_RL, places_RL, scores_of(row, budget))
    at_hand = joined(memory, keys)
    of_queries = bins_of(row.q_RLN, row.documents_RL, budget)
    of_keys = bins_of(at_hand.keys_RSN, at_hand.documents_RS, budget)
    seen = Seen(budget, at_hand.documents_RS, at_hand.places_RS, of_queries, of_keys, at_hand.scores_RS)
    y = sparse_attention(SparseInputs(row.q_RLN, at_hand.keys_RSN, at_hand.values_RSP, seen))
    return y, remember(budget, at_hand, of_keys, slots_of(budget))


def scores_of(row: Row, budget: Budget) -> Tensor | None:
    if not budget.best:
        return None
    return row.scores_RL


def seen_of(row: Row, budget: Budget) -> Seen:
    query_bins, key_bins = (bins_of(x, row.documents_RL, budget) for x in (row.q_RLN, row.k_RLN))
    places_RL = places_of(row.documents_RL)
    return Seen(budget, row.documents_RL, places_RL, query_bins, key_bins, scores_of(row, budget))


def by_hand(row: Row, budget: Budget) -> Tensor:
    """Mark the keys that each query sees, by the paper's sentences, in loops over single tokens."""
    rows, length = row.documents_RL.shape
    visible = torch.zeros(rows, length, length, dtype=torch.bool)
    bins = [bins_of(x, row.documents_RL, budget) for x in (row.q_RLN, row.k_RLN)]
    for r in range(rows):
        documents = row.documents_RL[r].tolist()
        for i in range(length):
            past = [j for j in range(i + 1) if documents[j] == documents[i]]
            begin = past[0]
            columns = [j for j in past if (j - begin) % budget.stride == budget.stride - 1]
            of_query, of_keys = bins
            same = [] if of_keys is None else [j for j in past if of_query[r, i] == of_keys[r, j]]
            best = sorted(past, key=lambda j: (-float(row.scores_RL[r, j]), j))[: budget.best]
            nearest = ((columns, budget.strided), (same, budget.bin))
            near = [j for some, most in nearest if most for j in some[-most:]]
            window = [j for j in past if i - j < budget.recent]
            for j in (*window, *past[: budget.first], *near, *best):
                visible[r, i, j] = True
    return visible


def values_and_gradients(form: str, row: Row, budget: Budget) -> list[Tensor]:
    with force(sparse_attention=form):
        y = attend(row, budget)[0]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), row[:3], materialize_grads=True, allow_unused=True)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_visible_keys_are_those_of_the_paper(name: str, ties: bool) -> None:
    for length in (1, 3, 20, 41):
        row = random_row(length, borders=0.1, ties=ties)
        expected = by_hand(row, PATTERNS[name])
        assert torch.equal(visible_keys(seen_of(row, PATTERNS[name]), length), expected)
        budget = PATTERNS[name]
        at_most = budget.recent + budget.first + budget.strided + budget.bin + budget.best
        assert expected.sum(-1).max() <= at_most


@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_equal_the_reference(name: str) -> None:
    """Use rows shorter and longer than the budget and than a tile, documents, and ties."""
    for case, length in enumerate((1, 2, 5, 17, 63, 64, 65, 129, 190)):
        row = random_row(length, borders=(0, 0.05)[case % 2], ties=case % 3 == 0)
        assert_close(*(values_and_gradients(form, row, PATTERNS[name]) for form in ("tiled", "reference")))


@pytest.mark.parametrize(("length", "form"), [(256, "dense"), (257, "tiled")])
def test_short_rows_take_the_dense_mask_on_a_cpu(length: int, form: str) -> None:
    row = random_row(length)
    budget = PATTERNS["hax"]
    inputs = SparseInputs(row.q_RLN, row.k_RLN, row.v_RLP, seen_of(row, budget))
    assert sparse_attention.selected(inputs).name == form


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 8, 64, 800])
@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_equal_the_reference_at_many_lengths(name: str, most: int) -> None:
    rules = {rule: most for rule in Budget._fields[:-1] if getattr(PATTERNS[name], rule)}
    budget = PATTERNS[name]._replace(**rules)
    for case, length in enumerate((1, 7, 50, 64, 66, 127, 200, 333, 512, 700)):
        row = random_row(length, borders=(0, 4 / length)[case % 2], ties=case % 3 == 0)
        assert_close(*(values_and_gradients(form, row, budget) for form in ("tiled", "reference")))


@pytest.mark.parametrize("form", ["tiled", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_pieces_with_a_carried_memory_equal_the_whole_row(name: str, form: str) -> None:
    """Values, gradients and the memory at the end, in three pieces, also where documents end; and token by token."""
    budget = PATTERNS[name]
    length = 37
    for borders in (0.0, 0.1):
        row = random_row(length, borders=borders, ties=True)
        with force(sparse_attention=form):
            whole, last = attend(row, budget)
            expected = torch.autograd.grad(whole.square().sum(), row[:3], materialize_grads=True, allow_unused=True)
            for cuts in ((0, 1, 2, length), (0, 9, 30, length), tuple(range(length + 1))):
                memory = None
                pieces = []
                for start, stop in itertools.pairwise(cuts):
                    piece = row.part(start, stop)
                    if memory is not None:  # of a document that continues alone
                        continues = row.documents_RL[:, start] == row.documents_RL[:, start - 1]
                        memory = SparseMemory(*(None if x is None else emptied(x, continues) for x in memory))
                    y, memory = attend(piece, budget, memory)
                    pieces.append(y)
                joined_y = torch.cat(pieces, dim=1)
                grads = torch.autograd.grad(joined_y.square().sum(), row[:3], materialize_grads=True, allow_unused=True)
                assert_close([joined_y, *grads], [whole, *expected])
                assert memory is not None
                assert_close([x for x in memory if x is not None], [x for x in last if x is not None])


def emptied(x: Tensor, continues_R: Tensor) -> Tensor:
    return x * continues_R.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)


@pytest.mark.parametrize("name", PATTERNS)
def test_later_tokens_change_no_earlier_output(name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        row = random_row(150)
        other = Row(*(torch.cat((x[:, :100], y[:, 100:]), 1) for x, y in zip(row, random_row(150), strict=True)))
        ours, theirs = (attend(rows, PATTERNS[name])[0][:, :100] for rows in (row, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_query_without_visible_keys_has_zero_output_and_gradient() -> None:
    row = random_row(70, rows=1)
    for form in ("tiled", "reference"):
        y, of_q, *_ = values_and_gradients(form, row, Budget(strided=4, stride=50))
        assert not y[:, :49].any()
        assert y[:, 49:].all()
        assert not of_q[:, :49].any()
        assert all(g.isfinite().all() for g in (y, of_q))


@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_hold_every_pair_once_and_grow_linearly(name: str) -> None:
    pairs = []
    for length in (1024, 2048):
        row = random_row(length, borders=5 / length)
        seen = seen_of(row, PATTERNS[name])
        parts = list(parts_of(seen, length))
        pairs.append(sum(x.queries_TQ.numel() * x.keys_TW.shape[1] for x in (part.tiles() for part in parts)))
        for part in parts:
            queries_TQ, keys_TW = tiles = part.tiles()
            visible_TQW = part.sees(tiles) & (queries_TQ >= 0)[..., None] & (keys_TW >= 0)[:, None]
            asked = torch.broadcast_to(queries_TQ[..., None], visible_TQW.shape)[visible_TQW]
            answering = torch.broadcast_to(keys_TW[:, None], visible_TQW.shape)[visible_TQW]
            numbers = asked * 2 * length + answering
            assert len(numbers.unique()) == len(numbers)
    assert pairs[1] < 2.3 * pairs[0]
    assert pairs[0] < 2 * 1024 * len(parts) * 3 * (TILE + 6)


def test_hash_bins_equal_the_equations_of_the_paper() -> None:
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    documents = torch.zeros(2, 9, dtype=torch.int64)
    for rule in ("sign", "argmax"):
        bins = hash_bins(x, documents, MATRIX, rule, "features")
        for r in range(2):
            for i in range(9):
                centred = x[r, i] - x[r, i].mean()
                products = [float(centred / centred.norm() @ MATRIX[:, j].double()) for j in range(HASHES)]
                digits = sum(2 ** (HASHES - 1 - j) for j in range(HASHES) if products[j] > 0)
                assert bins[r, i] == {"sign": digits, "argmax": products.index(max(products))}[rule]


def test_bins_centred_over_the_sequence_alone_see_the_future() -> None:
    x = torch.randn(1, 40, SIZE, dtype=torch.float64)
    documents = torch.zeros(1, 40, dtype=torch.int64)
    documents[:, 30:] = 1
    changed = x.clone()
    changed[:, 20:30] += 3
    for centre, leaks in (("features", False), ("sequence", True)):
        before, after = (hash_bins(tokens, documents, MATRIX, "sign", centre) for tokens in (x, changed))
        assert torch.equal(before[:, :20], after[:, :20]) is not leaks
        assert torch.equal(before[:, 30:], after[:, 30:])  # no other document, in either mode


def test_hash_matrix_depends_on_its_seed_alone() -> None:
    device = torch.device("cpu")
    assert torch.equal(hash_matrix(7, 16, 64, device), hash_matrix(7, 16, 64, device))
    assert not torch.equal(hash_matrix(7, 16, 64, device), hash_matrix(8, 16, 64, device))
    wide = hash_matrix(2**64 - 1, 256, 256, device)
    assert wide.mean().abs() < 0.02
    assert (wide.std() - 1).abs() < 0.02
