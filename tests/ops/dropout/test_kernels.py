"""The Triton kernel of dropout draws and rounds as the reference does, bit for bit, and compiles for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.dropout import DropoutInputs, channel_numbers, dropout, token_numbers
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")


def results(implementation: str, x_LBC: Tensor, dy: Tensor, share: float) -> list[Tensor]:
    length, rows, channels = x_LBC.shape
    x_LBC = x_LBC.detach().requires_grad_()
    tokens_BL = token_numbers(2**63 + 11, torch.arange(length).expand(rows, -1), 3)
    tokens_LB = tokens_BL.T.to(x_LBC.device)
    numbers_C = channel_numbers(2**63 + 11, 9, channels).to(x_LBC.device)
    with force(dropout=implementation):
        y = dropout(DropoutInputs(x_LBC, tokens_LB, numbers_C, share))
    return [y.detach(), *torch.autograd.grad(y, x_LBC, dy)]


@pytest.mark.parametrize("shape", [(3, 1, 2), (2, 5, 34), (1, 2, 1025)], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.75])
def test_triton_dropout_equals_the_reference(shape: tuple[int, int, int], share: float) -> None:
    """Compare in fp32, because the interpreter truncates to bf16 instead of rounding."""
    x, dy = torch.randn(2, *shape)
    expected = results("reference", x, dy, share)
    actual = results("triton", x.to(compute_device()), dy.to(compute_device()), share)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.cpu() == 0, theirs == 0)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-7, atol=0)


def test_triton_dropout_equals_the_reference_in_bf16() -> None:
    x, dy = torch.randn(2, 7, 3, 40).bfloat16()
    expected, actual = (results(form, x, dy, 0.5) for form in ("reference", "triton"))
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)  # twice a value is exact


def shipped() -> None:
    """Launch the kernels at the sizes of recipes."""
    with torch.device("meta"):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.empty(4096, 8, 2560, dtype=dtype, requires_grad=True)
            tokens = torch.empty(4096, 8, dtype=torch.int32)
            channels = torch.empty(2560, dtype=torch.int32)
            dropout.named("triton").function(DropoutInputs(x, tokens, channels, 0.05)).sum().backward()


@pytest.mark.slow
def test_triton_dropout_compiles_for_a_hopper_gpu_without_spills() -> None:
    launches, buffers = compile_calls("tests.ops.dropout.test_kernels", "shipped")
    assert {launch.kernel for launch in launches} == {"_drop"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert max(buffers) == 4096 * 8 * 2560
