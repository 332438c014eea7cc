"""RMSNorm against transformers' Llama, and its gradients."""

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_llamas(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 64, dtype=dtype)
    weight = torch.randn(64)
    theirs = LlamaRMSNorm(64, eps=1e-5)
    theirs.weight.data.copy_(weight)
    y = rms_norm(RMSNormInputs(x, weight, 1e-5))
    tolerance = 1e-6
    if dtype == torch.bfloat16:
        tolerance = 2**-8
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), theirs(x.float()), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_a_sum_equals_a_sum_and_a_norm(dtype: torch.dtype) -> None:
    x, added = (torch.randn(3, 5, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.randn(64, requires_grad=True)
    dsum, dy = torch.randn(2, 3, 5, 64, dtype=dtype)
    summed = x + added
    fused = add_rms_norm(AddRMSNormInputs(x, added, weight, 1e-5))
    separate = (summed, rms_norm(RMSNormInputs(summed, weight, 1e-5)))
    gradients, expected = (
        torch.autograd.grad(outputs, (x, added, weight), (dsum, dy), retain_graph=True) for outputs in (fused, separate)
    )
    assert all(map(torch.equal, fused, separate))
    assert all(map(torch.equal, gradients, expected))


def test_gradients_are_the_slopes() -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4, 6), (6,)))
    added = torch.randn_like(x, requires_grad=True)
    assert gradcheck(lambda *tensors: rms_norm(RMSNormInputs(*tensors, 1e-5)), (x, weight))
    assert gradcheck(lambda *tensors: add_rms_norm(AddRMSNormInputs(*tensors, 1e-5)), (x, added, weight))
