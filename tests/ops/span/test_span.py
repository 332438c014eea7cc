"""Span-expanded attention: reference and choice against loops over single tokens, the compiled form against both."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.dispatch import force
from hybridtron.ops.span import (
    CarriedBlocks,
    ChoiceRule,
    SpanCut,
    SpanInputs,
    SpanSegment,
    Whole,
    choose_at_random,
    choose_by_relevance,
    known_of,
    span_attention,
)
from hybridtron.ops.span.choice import choose, random_relevance, relevance, summaries

FORMS = pytest.mark.parametrize("form", ["reference", "native"])
LENGTH = 45
HEADS = 4
GROUPS = 2
SIZE = 8
ALL = slice(0, 2)
WHOLE = (SpanSegment(ALL, 0, LENGTH),)
BORDERS = (
    SpanSegment(slice(0, 1), 0, 20),
    SpanSegment(slice(0, 1), 20, LENGTH),
    SpanSegment(slice(1, 2), 0, 7),
    SpanSegment(slice(1, 2), 7, LENGTH),
)


class Heads(NamedTuple):
    """Queries, keys and values of some rows."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_heads(length: int = LENGTH, groups: int = GROUPS, dtype: torch.dtype = torch.float64) -> Heads:
    """Queries, keys and values of two rows, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, count, SIZE) for count in (HEADS, groups, groups)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return Heads(q, k, v)


def chosen_for(cut: SpanCut, rule: ChoiceRule, heads: Heads) -> list[Tensor | None]:
    rows = Whole(heads.q.shape[1], heads.k.shape[2], partial(known_of, cut, rule, heads, None))
    return choose_by_relevance(cut, rule, rows, CarriedBlocks(0, 0))[0]


def attend(form: str, heads: Heads, cut: SpanCut, chosen: list[Tensor | None]) -> Tensor:
    with force(span_attention=form):
        return span_attention(SpanInputs(heads.q, heads.k, heads.v, cut, chosen))


def results(form: str, heads: Heads, cut: SpanCut, chosen: list[Tensor | None]) -> list[Tensor]:
    """Return the output, and the gradients of a weighted sum over it."""
    return with_gradients(attend(form, heads, cut, chosen), heads)


def with_gradients(y: Tensor, heads: Heads) -> list[Tensor]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), heads)]


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def softmax(scores: list[float]) -> list[float]:
    raised = [math.exp(score / math.sqrt(SIZE)) for score in scores]
    return [term / sum(raised) for term in raised]


def mixed(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    weights = softmax([float(query @ key) for key in keys])
    return sum((w * value for w, value in zip(weights, values, strict=True)), torch.zeros(SIZE, dtype=torch.float64))


def by_loops(q: Tensor, k: Tensor, v: Tensor, chunk: int, block: int, rule: ChoiceRule) -> Tensor:
    """Compute one document, token by token: q is (L, H, K), k and v (L, G, K)."""
    length = len(q)
    heads = q.shape[1]
    share = q.shape[1] // k.shape[1]
    y = torch.zeros_like(q)
    summary = {}
    for h, j in itertools.product(range(heads), range(length // block)):
        tokens = range(j * block, (j + 1) * block)
        keys = [k[i, h // share] for i in tokens]
        values = [v[i, h // share] for i in tokens]
        asking = [q[i, h] for i in tokens]
        if rule.landmarks_HK is not None:
            asking = [rule.landmarks_HK[h]]
        summary[h, j] = sum(mixed(query, keys, values) for query in asking) / len(asking)
    for g, t in itertools.product(range(k.shape[1]), range(math.ceil(length / chunk))):
        begin = t * chunk
        end = min((t + 1) * chunk, length)
        asking = range(begin - chunk, begin) if rule.previous else range(begin, end)
        scores = {
            j: sum(float(q[i, h] @ summary[h, j]) for h in range(g * share, (g + 1) * share) for i in asking)
            for j in range(length // block)
            if (j + 1) * block <= begin
        }
        best = sorted(scores, key=lambda j: (-scores[j], j))[: rule.most]
        read = [i for j in sorted(best) for i in range(j * block, (j + 1) * block)]
        for i, h in itertools.product(range(begin, end), range(g * share, (g + 1) * share)):
            seen = [*read, *range(begin, i + 1)]
            y[i, h] = mixed(q[i, h], [k[s, g] for s in seen], [v[s, g] for s in seen])
    return y


LANDMARKS = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@FORMS
@pytest.mark.parametrize("segments", [WHOLE, BORDERS], ids=["whole", "borders"])
@pytest.mark.parametrize(
    ("chunk", "block", "rule"),
    [
        (8, 4, ChoiceRule(2, False)),
        (8, 4, ChoiceRule(2, True)),
        (6, 3, ChoiceRule(3, False, LANDMARKS)),
        (4, 4, ChoiceRule(1, True)),
        (8, 2, ChoiceRule(0, False)),
    ],
)
def test_forms_equal_the_equations(
    form: str, segments: tuple[SpanSegment, ...], chunk: int, block: int, rule: ChoiceRule
) -> None:
    q, k, v = (x.detach() for x in random_heads())
    cut = SpanCut(chunk, block, segments)
    heads = Heads(q, k, v)
    y = attend(form, heads, cut, chosen_for(cut, rule, heads))
    for segment in segments:
        for row in range(segment.rows.start, segment.rows.stop):
            here = slice(segment.start, segment.stop)
            alone = by_loops(q[row, here], k[row, here], v[row, here], chunk, block, rule)
            torch.testing.assert_close(y[row, here], alone)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("segments", [WHOLE, BORDERS], ids=["whole", "borders"])
@pytest.mark.parametrize(
    ("chunk", "block", "most", "shift"), [(8, 4, 2, 0), (32, 2, 3, 0), (4, 4, 9, 0), (10, 2, 0, 5)]
)
def test_compiled_form_equals_the_reference(
    groups: int, segments: tuple[SpanSegment, ...], chunk: int, block: int, most: int, shift: int
) -> None:
    heads = random_heads(groups=groups)
    cut = SpanCut(chunk, block, segments, shift)
    if shift:
        chosen = [None] * len(segments)
    else:
        chosen = chosen_for(cut, ChoiceRule(most, False), heads)
    assert_all_close(results("native", heads, cut, chosen), results("reference", heads, cut, chosen))


def test_compiled_form_equals_the_reference_in_fp32() -> None:
    heads = random_heads(1100, dtype=torch.float32)
    cut = SpanCut(512, 32, (SpanSegment(ALL, 0, 1100),))
    chosen = chosen_for(cut, ChoiceRule(8, False), heads)
    assert_all_close(results("native", heads, cut, chosen), results("reference", heads, cut, chosen), 1e-5)


@FORMS
def test_bf16_is_near_the_reference_in_float64(form: str) -> None:
    halves = random_heads(dtype=torch.bfloat16)
    exact = Heads(*(x.detach().double().requires_grad_() for x in halves))
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(2, False), exact)
    actual = results(form, halves, cut, chosen)
    assert all(x.dtype == torch.bfloat16 for x in actual)
    assert_all_close([x.double() for x in actual], results("reference", exact, cut, chosen), 0.05)


@FORMS
def test_gradients_are_the_slopes(form: str) -> None:
    q, k, v = (x.detach()[:1, :10, :2, :2].requires_grad_() for x in random_heads())
    cut = SpanCut(4, 2, (SpanSegment(slice(0, 1), 0, 10),))
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(1, 2, 3, 5, generator=generator)
    chosen = [choose(scores, [0, 2, 4], 2)]
    with force(span_attention=form):
        assert gradcheck(lambda *x: span_attention(SpanInputs(*x, cut, chosen)), (q, k, v), fast_mode=True)


@FORMS
def test_span_attention_with_all_blocks_equals_full_attention(form: str) -> None:
    heads = random_heads()
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(100, False), heads)
    expected = with_gradients(attention(AttentionInputs(heads.q, heads.k, heads.v)), heads)
    assert_all_close(results(form, heads, cut, chosen), expected)


@FORMS
def test_span_attention_without_blocks_treats_chunks_as_rows(form: str) -> None:
    heads = random_heads()
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(0, False), heads)
    assert chosen == [None]
    y = attend(form, heads, cut, chosen)
    for start in range(0, LENGTH, 8):
        q, k, v = (x[:, start : start + 8] for x in heads)
        torch.testing.assert_close(y[:, start : start + 8], attention(AttentionInputs(q, k, v)))


def test_summaries_by_landmarks_are_weighted_means_of_values() -> None:
    """A landmark of zeros gives the mean of the values; blocks of one token are their values."""
    q, k, v = random_heads()
    mean = v[:, :44].unflatten(1, (11, 4)).mean(2).repeat_interleave(2, dim=2)
    torch.testing.assert_close(summaries(q, k, v, 4, 0 * LANDMARKS), mean.detach())
    for landmarks in (LANDMARKS, None):
        torch.testing.assert_close(summaries(q, k, v, 1, landmarks), v.detach().repeat_interleave(2, dim=2))


def test_relevance_sums_over_the_heads_of_a_group() -> None:
    sums = torch.randn(2, 3, HEADS, SIZE)
    of_blocks = torch.randn(2, 5, HEADS, SIZE)
    by_head = torch.einsum("rthk,ruhk->rhtu", sums, of_blocks)
    torch.testing.assert_close(relevance(sums, of_blocks, 2), by_head.unflatten(1, (2, 2)).sum(2))


def test_earlier_block_is_chosen_among_equals() -> None:
    scores = torch.tensor([[2.0, 1, 1, 3, 1, 1], [0, 0, 0, 0, 9, 9], [5, 5, 4, 4, 4, 4]])[None, None]
    assert choose(scores, [6, 4, 6], 3).tolist() == [[[[0, 1, 3], [0, 1, 2], [0, 1, 2]]]]
    assert choose(scores, [0, 1, 2], 4).tolist() == [[[[-1, -1], [0, -1], [0, 1]]]]
    assert choose(scores, [0, 0, 0], 4) is None


def test_random_relevance_depends_on_seed_and_position_alone() -> None:
    whole = random_relevance(7, range(3), [0, 1, 2], range(4), range(50))
    assert torch.equal(random_relevance(7, range(1, 3), [2], range(2, 4), range(9, 20)), whole[1:, 2:, 2:, 9:20])
    assert whole.unique().numel() == whole.numel()
    assert abs(whole.mean() - 0.5) < 0.02
    assert abs(whole.var() - 1 / 12) < 0.005
    other = random_relevance(8, range(3), [0, 1, 2], range(4), range(50))
    correlation = torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1]
    assert abs(correlation) < 0.1


def test_random_blocks_lie_in_the_past_and_differ() -> None:
    cut = SpanCut(8, 2, WHOLE)
    (chosen,) = choose_at_random(cut, 3, 1, [0, 1], torch.device("cpu"))
    assert chosen is not None
    assert (chosen[:, :, 0] == -1).all()
    for chunk in range(1, 6):
        blocks = chosen[:, :, chunk]
        assert ((blocks >= 0) & (blocks < 4 * chunk)).all()
        assert all(len(set(of_head)) == 3 for of_head in blocks.flatten(0, 1).tolist())
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[:, 0], chosen[:, 1])


@FORMS
def test_later_tokens_change_no_bit_before_their_chunk(form: str) -> None:
    """Bit for bit: other tokens from 21 on change nothing before their chunk, and with the choice frozen nothing at
    all before them."""
    heads = Heads(*(x.detach() for x in random_heads()))
    others = Heads(*(torch.cat((x[:, :21], torch.randn_like(x[:, 21:])), dim=1) for x in heads))
    cut = SpanCut(8, 4, WHOLE)
    for rule, safe in ((ChoiceRule(2, False), 16), (ChoiceRule(2, True), 21), (ChoiceRule(2, False, LANDMARKS), 16)):
        frozen = chosen_for(cut, rule, heads)
        before = attend(form, heads, cut, frozen)
        chosen_again = attend(form, others, cut, chosen_for(cut, rule, others))
        chosen_then = attend(form, others, cut, frozen)
        assert torch.equal(chosen_again[:, :safe], before[:, :safe])
        assert torch.equal(chosen_then[:, :21], before[:, :21])
        assert not torch.equal(chosen_again[:, 21:], before[:, 21:])


def test_rolled_groups_of_shifted_attention_would_leak() -> None:
    """Rolling the row by half a group puts its first tokens behind its last ones; `shift` cuts there instead."""
    heads = Heads(*(x.detach() for x in random_heads(32)))
    others = Heads(*(torch.cat((x[:, :28], x[:, 28:] + 1), dim=1) for x in heads))

    def rolled(heads: Heads) -> Tensor:
        q, k, v = (x.roll(-4, dims=1).unflatten(1, (4, 8)).flatten(0, 1) for x in heads)
        return attention(AttentionInputs(q, k, v)).unflatten(0, (2, 4)).flatten(1, 2).roll(4, dims=1)

    def shifted(heads: Heads) -> Tensor:
        cut = SpanCut(8, 8, (SpanSegment(ALL, 0, 32),), shift=4)
        return span_attention(SpanInputs(heads.q, heads.k, heads.v, cut, [None]))

    assert not torch.equal(rolled(heads)[:, :28], rolled(others)[:, :28])
    assert torch.equal(shifted(heads)[:, :28], shifted(others)[:, :28])
    torch.testing.assert_close(shifted(heads)[:, 4:28], rolled(heads)[:, 4:28])
