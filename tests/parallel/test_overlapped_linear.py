"""Products handed out in parts, as on a GPU, beside autograd's own gradients of one product that is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.parallel.overlapped_linear import InputComm, OverlappedColumnLinear

SIZES = ((5, 7, 1), (4,))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_parts_equal_those_of_the_whole(frozen: bool) -> None:
    torch.manual_seed(0)
    x_LBD = torch.randn(9, 2, 6, dtype=torch.float64)
    weights = [torch.randn(sum(sizes), 6, dtype=torch.float64) for sizes in SIZES]
    leaves = [x_LBD.clone().requires_grad_(), *(weight.clone().requires_grad_(not frozen) for weight in weights)]
    expected = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    entered = OverlappedColumnLinear.apply(leaves[0], InputComm(None, False, False, SIZES), leaves[1], leaves[2])
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
    for ours, theirs in zip(leaves, expected, strict=True):
        assert (ours.grad is None) == (not ours.requires_grad)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)
        elif ours.grad is not None:
            assert not ours.grad.any()


def lossy(parts: list[Tensor]) -> Tensor:
    """Return a loss whose gradients have rows and tokens exchanged, and are absent for the last part."""
    first = [part.transpose(0, 1).sin().cumsum(1).sum() for part in parts[:-1]]
    return torch.stack(first).sum()
