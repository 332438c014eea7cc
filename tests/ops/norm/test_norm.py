"""RMSNorm against transformers' Llama, and its gradients."""

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 64, dtype=dtype)
    weight = torch.randn(64)
    theirs = LlamaRMSNorm(64, eps=1e-5)
    theirs.weight.data.copy_(weight)
    y = rms_norm(RMSNormInputs(x, weight, 1e-5))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), theirs(x.float()), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum_is_that_of_the_sum_by_itself(dtype: torch.dtype) -> None:
    x, added = (torch.randn(3, 5, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.randn(64, requires_grad=True)
    dsum, dy = torch.randn(2, 3, 5, 64, dtype=dtype)
    summed = x + added
    pairs = (
        add_rms_norm(AddRMSNormInputs(x, added, weight, 1e-5)),
        (summed, rms_norm(RMSNormInputs(summed, weight, 1e-5))),
    )
    ours, theirs = ((*p, *torch.autograd.grad(p, (x, added, weight), (dsum, dy), retain_graph=True)) for p in pairs)
    assert all(map(torch.equal, ours, theirs))


def test_gradients() -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4, 6), (6,)))
    added = torch.randn_like(x, requires_grad=True)
    assert gradcheck(lambda *tensors: rms_norm(RMSNormInputs(*tensors, 1e-5)), (x, weight))
    assert gradcheck(lambda *tensors: add_rms_norm(AddRMSNormInputs(*tensors, 1e-5)), (x, added, weight))
