"""A projection adds its gradient in place to that of the input's other use. The result equals autograd's own sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hybridtron.ops.product import LinearInputs
from hybridtron.ops.product.branch import _Branch, branch


@pytest.mark.parametrize("tokens_first", [False, True])
def test_gradients_are_those_of_both_uses(tokens_first: bool) -> None:
    torch.manual_seed(0)
    shape = (5, 3, 8) if tokens_first else (3, 5, 8)
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(4, 8, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, x, weight)]
    again, y = _Branch.apply(*leaves[:2])
    (again.transpose(0, 1).sin().sum() + y.cos().sum()).backward()  # the first gradient comes transposed
    (leaves[2].sin().sum() + functional.linear(*leaves[2:]).cos().sum()).backward()
    torch.testing.assert_close(y, functional.linear(x, weight))
    for found, expected in zip(leaves[:2], leaves[2:], strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_on_a_cpu_nothing_is_done_in_place() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(4, 8)
    again, y = branch(LinearInputs(x, weight))
    assert again is x
    assert torch.equal(y, functional.linear(x, weight))
