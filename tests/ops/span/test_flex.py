"""Span-expanded attention as FlexAttention: its forward on the CPU, its tiles, and on CUDA its backward."""

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.span import SpanCut, SpanInputs, SpanSegment, span_attention
from hybridtron.ops.span.choice import choose
from hybridtron.ops.span.flex import TILE, mask_of, places_of, tiles_of

LENGTH = 300
CUTS = {
    "whole": SpanCut(64, 16, (SpanSegment(slice(0, 2), 0, LENGTH),)),
    "borders": SpanCut(
        32,
        8,
        (
            SpanSegment(slice(0, 1), 0, 77, seen=45, kept=29),
            SpanSegment(slice(0, 1), 77, LENGTH),
            SpanSegment(slice(1, 2), 0, 200, seen=5, kept=5),
            SpanSegment(slice(1, 2), 200, LENGTH),
        ),
    ),
    "shifted": SpanCut(40, 8, (SpanSegment(slice(0, 2), 0, LENGTH),), shift=20),
}


def case(name: str, share: int = 2, device: str = "cpu") -> tuple[list[Tensor], SpanCut, list[Tensor | None]]:
    """Queries, keys with a memory of 40 tokens, values, and random choices."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, 2 * share, 16), (2, LENGTH + 40, 2, 16), (2, LENGTH + 40, 2, 16)]
    tensors = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    cut = CUTS[name]
    chosen = []
    for segment in cut.segments:
        available = cut.available(segment)
        rows = segment.rows.stop - segment.rows.start
        scores = torch.rand(rows, 2, len(available), max(available) + 1, generator=generator)
        if cut.shift:
            chosen.append(None)
        else:
            chosen.append(choose(scores.to(device), available, 3))
    return tensors, cut, chosen


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("name", CUTS)
def test_forward_equals_the_reference(name: str, share: int) -> None:
    (q, k, v), cut, chosen = case(name, share)
    inputs = SpanInputs(q.detach(), k.detach(), v.detach(), cut, chosen)
    outputs = {}
    for form in ("flex", "reference"):
        with force(span_attention=form):
            outputs[form] = span_attention(inputs)
    torch.testing.assert_close(outputs["flex"], outputs["reference"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CUTS)
def test_tiles_hold_all_visible_pairs_and_little_more(name: str) -> None:
    (q, k, v), cut, chosen = case(name)
    places = places_of(SpanInputs(q, k, v, cut, chosen))
    shape = (2, 2, LENGTH, LENGTH + 40)
    b, g, i, j = (
        torch.arange(size).view([-1 if axis == n else 1 for n in range(4)]) for axis, size in enumerate(shape)
    )
    seen = mask_of(places, 1)(b, g, i, j)
    padded = torch.nn.functional.pad(seen, (0, -shape[3] % TILE, 0, -shape[2] % TILE))
    expected = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).any(5).any(3)
    tiles = tiles_of(places)
    assert not (expected & ~tiles).any()
    assert (tiles & ~expected).sum() <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS)
def test_gradients_equal_the_reference(name: str) -> None:
    (q, k, v), cut, chosen = case(name, device="cuda")
    results = {}
    for form in ("flex", "reference"):
        with force(span_attention=form):
            y = span_attention(SpanInputs(q, k, v, cut, chosen))
        results[form] = [y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))]
    for ours, theirs in zip(results["flex"], results["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
