"""A projection adds its gradient in place to that of the input's other use. The result equals autograd's own sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hybridtron.ops.product import LinearInputs
from hybridtron.ops.product.branch import _Branch, branch


@pytest.mark.parametrize("tokens_first", [False, True])
def test_gradients_of_both_uses_are_added(tokens_first: bool) -> None:
    torch.manual_seed(0)
    shape = (3, 5, 8)
    if tokens_first:
        shape = (5, 3, 8)
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(4, 8, dtype=torch.float64)
    our_x, our_weight, their_x, their_weight = (tensor.clone().requires_grad_() for tensor in (x, weight, x, weight))
    again, y = _Branch.apply(our_x, our_weight)
    (again.transpose(0, 1).sin().sum() + y.cos().sum()).backward()  # the first gradient comes transposed
    (their_x.sin().sum() + functional.linear(their_x, their_weight).cos().sum()).backward()
    torch.testing.assert_close(y, functional.linear(x, weight))
    torch.testing.assert_close(our_x.grad, their_x.grad)
    torch.testing.assert_close(our_weight.grad, their_weight.grad)


def test_branch_on_a_cpu_is_not_fused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(4, 8)
    again, y = branch(LinearInputs(x, weight))
    assert again is x
    assert torch.equal(y, functional.linear(x, weight))
