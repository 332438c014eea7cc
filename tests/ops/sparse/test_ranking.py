"""The ranking loss of key selection, and key scores, compared with loops and numbers worked out by hand."""

import math

import torch
import torch.nn.functional as F

from hybridtron.ops.sparse import candidates, query_directions, ranking_loss, worth_of_keys
from hybridtron.ops.sparse.ranking import document_sums, doubled_sums


def test_query_directions_are_running_sums_of_documents_and_continue_across_cuts() -> None:
    q = torch.randn(2, 11, 3, dtype=torch.float64)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    before = torch.randn(2, 3, dtype=torch.float64)
    directions, last = query_directions(q, documents, before)
    for r, starts in enumerate(([0, 4], [0])):
        for i in range(11):
            start = max(s for s in starts if s <= i)
            summed = q[r, start : i + 1].sum(0)
            if start == 0:
                summed = summed + before[r]
            torch.testing.assert_close(directions[r, i], summed / summed.norm(), rtol=1e-12, atol=1e-12)
    first, middle = query_directions(q[:, :2], documents[:, :2], before)
    second, end = query_directions(q[:, 2:], documents[:, 2:], middle)
    assert torch.equal(torch.cat((first, second), 1), directions)
    assert torch.equal(end, last)


def test_query_directions_have_no_bit_of_another_document() -> None:
    q = torch.randn(1, 12, 3)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    other = torch.cat((1e4 * torch.randn(1, 5, 3), q[:, 5:]), 1)
    ours, theirs = (query_directions(queries, documents, torch.randn(1, 3))[0][:, 5:] for queries in (q, other))
    assert torch.equal(ours, theirs)


def test_document_sums_are_equal_in_both_orders() -> None:
    for length in (1, 2, 37):
        x = torch.randn(2, length, 3, dtype=torch.float64)
        documents = (torch.rand(2, length) < 0.2).cumsum(1)
        expected, actual = (sums(x, documents) for sums in (document_sums, doubled_sums))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        x[documents == documents[:, :1]] *= 1e3
        other = documents != documents[:, :1]
        assert torch.equal(doubled_sums(x, documents)[other], actual[other])  # no bit of another document


HALVES = slice(0, 4), slice(4, 9)


def test_worth_of_a_key_is_a_sum_or_a_mean_over_its_queries() -> None:
    q = torch.randn(2, 9, 3, dtype=torch.float64)
    k = torch.randn(2, 9, 3, dtype=torch.float64)
    documents = torch.tensor([[0] * 9, [0] * 4 + [1] * 5])
    chosen = torch.tensor([[0, 5, 8], [2, 3, 4]])
    keys = k.gather(1, chosen[..., None].expand(-1, -1, 3))
    for target in ("sum", "mean"):
        of_chosen = documents.gather(1, chosen)
        sums, asked = worth_of_keys(q, documents, 0, keys, of_chosen, chosen)
        parts = [worth_of_keys(q[:, h], documents[:, h], h.start, keys, of_chosen, chosen) for h in HALVES]
        torch.testing.assert_close(parts[0][0] + parts[1][0], sums)
        assert torch.equal(parts[0][1] + parts[1][1], asked)
        worth = {"sum": sums, "mean": sums / asked}[target]
        for r in range(2):
            for c, j in enumerate(chosen[r].tolist()):
                asking = [i for i in range(j, 9) if documents[r, i] == documents[r, j]]
                terms = [1 / (1 + math.exp(-float(q[r, i] @ k[r, j]))) for i in asking]
                expected = {"sum": sum(terms), "mean": sum(terms) / len(terms)}[target]
                assert abs(float(worth[r, c]) - expected) < 1e-12


def test_ranking_loss_is_binary_cross_entropy_over_pairs_of_a_document() -> None:
    x = torch.randn(2, 5, dtype=torch.float64)
    y = torch.randn(2, 5, dtype=torch.float64)
    y[0, 1] = y[0, 3]
    documents = torch.tensor([[0] * 5, [0, 0, 1, 1, 1]])
    rows = []
    for r in range(2):
        terms = []
        for i in range(5):
            for j in range(5):
                if documents[r, i] == documents[r, j]:
                    wanted = (1 + float(torch.sign(y[r, i] - y[r, j]))) / 2  # 1, 0, or 1/2 for equal ones
                    p = 1 / (1 + math.exp(-float(x[r, i] - x[r, j])))
                    terms.append(-wanted * math.log(p) - (1 - wanted) * math.log(1 - p))
        rows.append(sum(terms) / len(terms))
    assert abs(float(ranking_loss(x, y, documents)) - sum(rows) / 2) < 1e-12


def test_ranking_loss_equals_its_closed_forms() -> None:
    """Equal scores cost ln 2; a perfect order, far apart, costs the diagonal's ln 2 / k; the gradient of a pair."""
    y = torch.randn(1, 8, dtype=torch.float64)
    whole = torch.zeros(1, 8, dtype=torch.int64)
    assert abs(float(ranking_loss(torch.zeros_like(y), y, whole)) - math.log(2)) < 1e-12
    perfect = 1e3 * y.argsort(1).argsort(1).double()
    assert abs(float(ranking_loss(perfect, y, whole)) - math.log(2) / 8) < 1e-12
    x = torch.randn(1, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(ranking_loss(x, y, whole), x)
    differences = torch.sigmoid(x[0, :, None] - x[0]) - (torch.sign(y[0, :, None] - y[0]) + 1) / 2
    torch.testing.assert_close(grad[0], 2 / 64 * differences.sum(1).detach(), rtol=1e-12, atol=1e-12)


def test_scores_learn_the_order_of_worth_by_the_ranking_loss() -> None:
    y = torch.randn(4, 16, dtype=torch.float64)
    whole = torch.zeros(4, 16, dtype=torch.int64)
    x = torch.zeros_like(y, requires_grad=True)
    for _ in range(200):
        (grad,) = torch.autograd.grad(ranking_loss(x, y, whole), x)
        x = (x - 20 * grad).detach().requires_grad_()
    assert torch.equal(x.argsort(1), y.argsort(1))


def test_candidates_are_distinct_tokens_drawn_by_the_seed() -> None:
    device = torch.device("cpu")
    chosen = candidates(2**64 - 1, 3, 50, 20, device)
    assert chosen.shape == (3, 20)
    assert all(len(set(row)) == 20 and 0 <= min(row) <= max(row) < 50 for row in chosen.tolist())
    assert torch.equal(chosen, candidates(2**64 - 1, 3, 50, 20, device))
    assert not torch.equal(chosen, candidates(1, 3, 50, 20, device))
    assert candidates(1, 1, 5, 20, device).shape == (1, 5)
    assert F.one_hot(candidates(1, 1, 5, 20, device), 5).sum() == 5
