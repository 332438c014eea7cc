"""Products handed out in parts, as on a GPU, beside autograd's own gradients of one product that is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.parallel.entered import EnteredProducts, Entry

SIZES = ((5, 7, 1), (4,))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_parts_are_those_of_the_whole(frozen: bool) -> None:
    torch.manual_seed(0)
    x_LBD = torch.randn(9, 2, 6, dtype=torch.float64)
    weights = [torch.randn(sum(sizes), 6, dtype=torch.float64) for sizes in SIZES]
    found = [x_LBD.clone().requires_grad_(), *(weight.clone().requires_grad_(not frozen) for weight in weights)]
    expected = [one.detach().clone().requires_grad_(one.requires_grad) for one in found]
    entered = EnteredProducts.apply(found[0], Entry(None, False, False, SIZES), *found[1:])
    assert [kept is None for kept in entered[0].grad_fn.saved_tensors] == [frozen]
    plain = [
        part
        for weight, sizes in zip(expected[1:], SIZES, strict=True)
        for part in functional.linear(expected[0], weight).split(sizes, -1)
    ]
    for ours, theirs in zip(entered, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    lossy(entered).backward()
    lossy(plain).backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.grad is None) == (not ours.requires_grad)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)


def lossy(parts: list[Tensor]) -> Tensor:
    """Return a loss whose gradients have rows and tokens exchanged, and are absent for the last part."""
    first = [part.transpose(0, 1).sin().cumsum(1).sum() for part in parts[:-1]]
    return torch.stack(first).sum()
