"""The loss of a product that is never whole: against all logits in float64, in one part and in several, from shares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.loss import (
    CrossEntropyInputs,
    LinearCrossEntropyInputs,
    VocabularyShare,
    chunked,
    cross_entropy,
    linear_cross_entropy,
)
from hybridtron.ops.softmax import SoftmaxSums, SoftmaxSumsInputs, softmax_sums
from hybridtron.ops.softmax import reference as softmax
from hybridtron.planning import count
from tests.live import Live

WIDTH = 7
VOCABULARY = 11
PARTS = pytest.mark.parametrize("tokens_at_a_time", [1, 4, 100])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def case(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Return the stream (2, 5, D), the weight, labels and a mask, equal at every call. Masked labels are not tokens."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale).to(dtype).requires_grad_()
        for shape in ((2, 5, WIDTH), (VOCABULARY, WIDTH))
    )
    labels = torch.randint(VOCABULARY, (2, 5), generator=generator)
    mask = torch.rand(2, 5, generator=generator) < 0.7
    mask[0, -1] = False
    return [x, weight, labels.masked_fill(~mask, -100), mask]


def room_for(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of `tokens` tokens at a time, and two rows of them in torch's own operations."""
    monkeypatch.setattr(count, "LOGITS_BYTES", tokens * VOCABULARY * dtype.itemsize)
    monkeypatch.setattr(softmax, "WORKSPACE", 2 * VOCABULARY)


def run(form: str, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, z_loss: float) -> list[Tensor]:
    """The loss, and the gradients of three times its total."""
    with force(linear_cross_entropy=form):
        loss = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, z_loss))
    return [*(value.detach() for value in loss), *torch.autograd.grad(3.0 * loss.total, (x, weight))]


@PARTS
@pytest.mark.parametrize("form", ["reference", "chunked"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_masked_rows_that_are_not_finite_change_the_gradient_of_the_weight_alone(
    wrong: float, form: str, tokens_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(tokens_at_a_time, torch.float64, monkeypatch)
    x, weight, labels, mask = case(torch.float64)
    expected = run(form, x, weight, labels, mask, 1e-2)
    broken = x.detach().masked_fill(~mask[..., None], wrong).requires_grad_()
    *losses, of_x, _ = run(form, broken, weight, labels, mask, 1e-2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(losses, expected, strict=False))
    assert torch.equal(of_x, expected[-2])
    assert not of_x[~mask].any()


@PARTS
@DTYPES
@pytest.mark.parametrize(("z_loss", "scale"), [(0.0, 1.0), (1e-2, 1.0), (1e-3, 20.0)])
def test_chunked_loss_equals_the_loss_of_all_logits(
    tokens_at_a_time: int, dtype: torch.dtype, z_loss: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(tokens_at_a_time, dtype, monkeypatch)
    x, weight, labels, mask = case(dtype, scale)
    results = run("chunked", x, weight, labels, mask, z_loss)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = run("reference", exact_x, exact_weight, labels, mask, z_loss)
    for ours, theirs in zip(results, expected, strict=True):
        size = theirs.abs().max().double()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=TOLERANCES[dtype] * max(1.0, size))
    assert [gradient.dtype for gradient in results[-2:]] == [dtype, dtype]
    assert not results[-2][~mask].any()


def test_gradient_of_a_weight_is_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 parts of one token each: in bf16 the later ones would be lost against the sum."""
    room_for(1, torch.bfloat16, monkeypatch)
    x = torch.ones(512, WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    mask = torch.ones(512, dtype=torch.bool)
    total = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 0.0)).total
    (gradient,) = torch.autograd.grad(total, weight)
    torch.testing.assert_close(gradient[0].float(), torch.full((WIDTH,), -512 * 10 / 11), rtol=4e-3, atol=0)
    torch.testing.assert_close(gradient[1].float(), torch.full((WIDTH,), 512 / 11), rtol=4e-3, atol=0)


def test_unwanted_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels, mask = case(torch.float64)
    expected = run("reference", x, weight, labels, mask, 0.1)
    loss = linear_cross_entropy(LinearCrossEntropyInputs(x, weight.detach(), labels, mask, 0.1))
    torch.testing.assert_close(torch.autograd.grad(3.0 * loss.total, x)[0], expected[-2])
    monkeypatch.setattr(chunked, "softmax_gradients", None)
    with torch.no_grad():
        loss = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 0.1))
    torch.testing.assert_close(loss.total, expected[0])
    assert not loss.total.requires_grad


def test_fully_masked_batch_has_zero_loss_and_gradient() -> None:
    x, weight, labels, mask = case(torch.float64)
    total, _, tokens, _, *gradients = run("chunked", x, weight, labels, mask & False, 0.1)
    assert total == tokens == 0
    assert not any(gradient.any() for gradient in gradients)


def test_second_backward_pass_is_refused() -> None:
    x, weight, labels, mask = case(torch.float64)
    total = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 0.1)).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


@PARTS
def test_repeated_calls_give_equal_bits(tokens_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(tokens_at_a_time, torch.float32, monkeypatch)
    x, weight, labels, mask = case(torch.float32)
    first, second = (run("chunked", x, weight, labels, mask, 0.1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_losses_of_vocabulary_shards_join_to_the_whole_loss(form: str) -> None:
    """A share's sums joined with the other's, which is worked out here; its gradients are its rows, and part of x's."""
    x, weight, labels, mask = case(torch.float64)
    logits = (x.flatten(0, 1) @ weight.T).detach()
    expected = run("reference", x, weight, labels, mask, 0.1)
    of_x = torch.zeros_like(x)
    of_weight = []
    for first, stop, other in ((0, 4, slice(4, 11)), (4, 11, slice(0, 4))):
        beyond = softmax_sums(SoftmaxSumsInputs(logits[:, other], labels.flatten() - other.start))
        share = VocabularyShare(first, lambda local, beyond=beyond: joined(local, beyond))
        with force(linear_cross_entropy=form):
            loss = linear_cross_entropy(LinearCrossEntropyInputs(x, weight[first:stop], labels, mask, 0.1, share))
        torch.testing.assert_close(loss.total, expected[0])
        torch.testing.assert_close(loss.per_token, expected[3])
        parts = torch.autograd.grad(3.0 * loss.total, (x, weight))
        of_x += parts[0]
        of_weight.append(parts[1][first:stop])
    torch.testing.assert_close(of_x, expected[-2])
    torch.testing.assert_close(torch.cat(of_weight), expected[-1])


def joined(first: SoftmaxSums, second: SoftmaxSums) -> SoftmaxSums:
    """Join the sums of two vocabulary shards."""
    greatest = torch.maximum(first.greatest_C, second.greatest_C)
    sums = (shard.sum_C * (shard.greatest_C - greatest).exp() for shard in (first, second))
    return SoftmaxSums(greatest, sum(sums, torch.zeros(())), first.picked_C + second.picked_C)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_within_the_planned_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute logits for 100 of 600 tokens at a time.

    Apart from the inputs, memory has a workspace and some values per token.
    """
    tokens = 600
    width = 16
    vocabulary = 500
    monkeypatch.setattr(count, "LOGITS_BYTES", 100 * vocabulary * dtype.itemsize)
    monkeypatch.setattr(softmax, "WORKSPACE", 10 * vocabulary)
    x, weight = (torch.randn(n, width).to(dtype).requires_grad_() for n in (tokens, vocabulary))
    labels = torch.randint(vocabulary, (tokens,))
    mask = torch.ones(tokens, dtype=torch.bool)
    with Live() as live:
        linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 1e-4))
    planned = count.loss_bytes(tokens, width, vocabulary, dtype.itemsize)
    beside = (tokens + vocabulary) * width * dtype.itemsize + 2 * 10 * vocabulary * 4 + 50 * tokens
    assert 0.9 * planned < live.peak < planned + beside
    assert planned + beside < tokens * vocabulary * dtype.itemsize


def test_reference_equals_the_cross_entropy_of_the_product() -> None:
    x, weight, labels, mask = case(torch.float64)
    with force("reference"):
        actual = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 0.1))
        expected = cross_entropy(CrossEntropyInputs(x @ weight.T, labels, mask, 0.1))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_empty_batch_has_zero_loss_and_gradient(form: str, shared: bool, shape: tuple[int, ...]) -> None:
    """Return zeros for the loss and its gradients, with all of the vocabulary and with a shard of it."""
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.zeros(shape, dtype=torch.long)
    mask = torch.ones(shape, dtype=torch.bool)
    share = None
    if shared:
        share = VocabularyShare(0, lambda sums: sums)
    with force(linear_cross_entropy=form):
        loss = linear_cross_entropy(LinearCrossEntropyInputs(x, weight, labels, mask, 0.1, share))
    assert [loss.total.item(), loss.cross_entropy.item(), loss.tokens.item()] == [0, 0, 0]
    assert loss.per_token.shape == shape
    of_x, of_weight = torch.autograd.grad(loss.total, (x, weight))
    assert of_x.shape == x.shape
    assert not of_weight.any()
