"""Span-expanded attention: reference and choice against loops over single tokens, the compiled form against both."""

import itertools
import math
from functools import partial

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


def inputs(length: int = LENGTH, groups: int = GROUPS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v of two rows, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, count, SIZE) for count in (HEADS, groups, groups)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def chosen_for(cut: SpanCut, rule: ChoiceRule, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor | None]:
    rows = Whole(q.shape[1], k.shape[2], partial(known_of, cut, rule, (q, k, v), None))
    return choose_by_relevance(cut, rule, rows, CarriedBlocks(0, 0))[0]


def gradients(y: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of a weighted sum over it."""
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), tensors)]


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def softmax(scores: list[float]) -> list[float]:
    raised = [math.exp(score / math.sqrt(SIZE)) for score in scores]
    return [each / sum(raised) for each in raised]


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
        asking = [q[i, h] for i in tokens] if rule.landmarks_HK is None else [rule.landmarks_HK[h]]
        summary[h, j] = sum(mixed(each, keys, values) for each in asking) / len(asking)
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
def test_forms_are_the_equations(
    form: str, segments: tuple[SpanSegment, ...], chunk: int, block: int, rule: ChoiceRule
) -> None:
    q, k, v = (x.detach() for x in inputs())
    cut = SpanCut(chunk, block, segments)
    with force(span_attention=form):
        y = span_attention(SpanInputs(q, k, v, cut, chosen_for(cut, rule, q, k, v)))
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
def test_the_compiled_form_is_the_reference(
    groups: int, segments: tuple[SpanSegment, ...], chunk: int, block: int, most: int, shift: int
) -> None:
    tensors = inputs(groups=groups)
    cut = SpanCut(chunk, block, segments, shift)
    chosen = [None] * len(segments) if shift else chosen_for(cut, ChoiceRule(most, False), *tensors)
    found = []
    for form in ("native", "reference"):
        with force(span_attention=form):
            found.append(gradients(span_attention(SpanInputs(*tensors, cut, chosen)), tensors))
    assert_all_close(*found)


def test_the_compiled_form_is_the_reference_in_fp32() -> None:
    tensors = inputs(1100, dtype=torch.float32)
    cut = SpanCut(512, 32, (SpanSegment(ALL, 0, 1100),))
    chosen = chosen_for(cut, ChoiceRule(8, False), *tensors)
    found = []
    for form in ("native", "reference"):
        with force(span_attention=form):
            found.append(gradients(span_attention(SpanInputs(*tensors, cut, chosen)), tensors))
    assert_all_close(*found, 1e-5)


@FORMS
def test_bf16_is_near_the_reference_in_float64(form: str) -> None:
    halves = inputs(dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in halves]
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(2, False), *exact)
    with force(span_attention=form):
        found = gradients(span_attention(SpanInputs(*halves, cut, chosen)), halves)
    assert all(x.dtype == torch.bfloat16 for x in found)
    with force(span_attention="reference"):
        expected = gradients(span_attention(SpanInputs(*exact, cut, chosen)), exact)
    assert_all_close([x.double() for x in found], expected, 0.05)


@FORMS
def test_gradients(form: str) -> None:
    q, k, v = (x.detach()[:1, :10, :2, :2].requires_grad_() for x in inputs())
    cut = SpanCut(4, 2, (SpanSegment(slice(0, 1), 0, 10),))
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(1, 2, 3, 5, generator=generator)
    chosen = [choose(scores, [0, 2, 4], 2)]
    with force(span_attention=form):
        assert gradcheck(lambda *x: span_attention(SpanInputs(*x, cut, chosen)), (q, k, v), fast_mode=True)


@FORMS
def test_with_all_blocks_it_is_full_attention(form: str) -> None:
    tensors = inputs()
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(100, False), *tensors)
    with force(span_attention=form):
        found = gradients(span_attention(SpanInputs(*tensors, cut, chosen)), tensors)
    assert_all_close(found, gradients(attention(AttentionInputs(*tensors)), tensors))


@FORMS
def test_with_no_block_chunks_are_rows_of_their_own(form: str) -> None:
    q, k, v = inputs()
    cut = SpanCut(8, 4, WHOLE)
    chosen = chosen_for(cut, ChoiceRule(0, False), q, k, v)
    assert chosen == [None]
    with force(span_attention=form):
        y = span_attention(SpanInputs(q, k, v, cut, chosen))
    for start in range(0, LENGTH, 8):
        alone = attention(AttentionInputs(*(x[:, start : start + 8] for x in (q, k, v))))
        torch.testing.assert_close(y[:, start : start + 8], alone)


def test_summaries_of_landmarks() -> None:
    """A landmark of zeros gives the mean of the values; blocks of one token are their values."""
    q, k, v = inputs()
    mean = v[:, :44].unflatten(1, (11, 4)).mean(2).repeat_interleave(2, dim=2)
    torch.testing.assert_close(summaries(q, k, v, 4, 0 * LANDMARKS), mean.detach())
    for landmarks in (LANDMARKS, None):
        torch.testing.assert_close(summaries(q, k, v, 1, landmarks), v.detach().repeat_interleave(2, dim=2))


def test_relevance_sums_over_the_heads_of_a_group() -> None:
    sums = torch.randn(2, 3, HEADS, SIZE)
    of_blocks = torch.randn(2, 5, HEADS, SIZE)
    by_head = torch.einsum("rthk,ruhk->rhtu", sums, of_blocks)
    torch.testing.assert_close(relevance(sums, of_blocks, 2), by_head.unflatten(1, (2, 2)).sum(2))


def test_of_equals_the_earlier_block_is_chosen() -> None:
    scores = torch.tensor([[2.0, 1, 1, 3, 1, 1], [0, 0, 0, 0, 9, 9], [5, 5, 4, 4, 4, 4]])[None, None]
    assert choose(scores, [6, 4, 6], 3).tolist() == [[[[0, 1, 3], [0, 1, 2], [0, 1, 2]]]]
    assert choose(scores, [0, 1, 2], 4).tolist() == [[[[-1, -1], [0, -1], [0, 1]]]]
    assert choose(scores, [0, 0, 0], 4) is None


def test_random_relevance_is_a_function_of_where_it_stands() -> None:
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
        assert all(len(set(each)) == 3 for each in blocks.flatten(0, 1).tolist())
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[:, 0], chosen[:, 1])


@FORMS
def test_a_token_reaches_later_chunks_and_its_own_past_stays(form: str) -> None:
    """Bit for bit: other tokens from 21 on change nothing before their chunk, and with the choice frozen nothing at
    all before them."""
    tensors = [x.detach() for x in inputs()]
    others = [torch.cat((x[:, :21], torch.randn_like(x[:, 21:])), dim=1) for x in tensors]
    cut = SpanCut(8, 4, WHOLE)
    for rule, safe in ((ChoiceRule(2, False), 16), (ChoiceRule(2, True), 21), (ChoiceRule(2, False, LANDMARKS), 16)):
        frozen = chosen_for(cut, rule, *tensors)
        with force(span_attention=form):
            before = span_attention(SpanInputs(*tensors, cut, frozen))
            chosen_again = span_attention(SpanInputs(*others, cut, chosen_for(cut, rule, *others)))
            chosen_then = span_attention(SpanInputs(*others, cut, frozen))
        assert torch.equal(chosen_again[:, :safe], before[:, :safe])
        assert torch.equal(chosen_then[:, :21], before[:, :21])
        assert not torch.equal(chosen_again[:, 21:], before[:, 21:])


def test_rolled_groups_of_shifted_attention_would_leak() -> None:
    """Rolling the row by half a group puts its first tokens behind its last ones; `shift` cuts there instead."""
    tensors = [x.detach() for x in inputs(32)]
    others = [torch.cat((x[:, :28], x[:, 28:] + 1), dim=1) for x in tensors]

    def rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = (x.roll(-4, dims=1).unflatten(1, (4, 8)).flatten(0, 1) for x in (q, k, v))
        return attention(AttentionInputs(*groups)).unflatten(0, (2, 4)).flatten(1, 2).roll(4, dims=1)

    def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return span_attention(SpanInputs(q, k, v, SpanCut(8, 8, (SpanSegment(ALL, 0, 32),), shift=4), [None]))

    assert not torch.equal(rolled(*tensors)[:, :28], rolled(*others)[:, :28])
    assert torch.equal(shifted(*tensors)[:, :28], shifted(*others)[:, :28])
    torch.testing.assert_close(shifted(*tensors)[:, 4:28], rolled(*tensors)[:, 4:28])
