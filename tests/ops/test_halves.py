"""The two halves of a tensor, and the way in which their gradients are joined."""

from __future__ import annotations

import pytest
import torch

from hybridtron.ops.halves import halves, joined


def test_halves_and_their_gradient_equal_those_of_chunk() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    first, second = halves(x)
    (gradient,) = torch.autograd.grad((first * weights[0] + second * weights[1]).sum(), x)
    assert torch.equal(torch.cat(halves(x), dim=-1), x)
    assert torch.equal(gradient, torch.cat(tuple(weights), dim=-1))


def test_gradients_side_by_side_in_memory_are_not_copied() -> None:
    both = torch.randn(3, 2, 8).transpose(0, 1)
    whole = joined(*both.chunk(2, dim=-1))
    assert whole.data_ptr() == both.data_ptr()
    assert torch.equal(whole, both)


def test_other_gradients_are_copied() -> None:
    both = torch.randn(2, 3, 8)
    first, second = both.chunk(2, dim=-1)
    for pair in ((second, first), (first, second.clone()), (first, first), (first[:1], second[1:])):
        assert torch.equal(joined(*pair), torch.cat(pair, dim=-1))


def test_an_odd_axis_has_no_halves() -> None:
    with pytest.raises(ValueError, match="odd size 7"):
        halves(torch.randn(2, 7))
