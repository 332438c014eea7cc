"""The SwiGLU gate: both forms against finite differences, transformers and each other."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.llama.modeling_llama import LlamaMLP

from hybridtron.ops.dispatch import force
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu

FORMS = pytest.mark.parametrize("form", ["reference", "recomputed", "native"])


@FORMS
def test_gradients(form: str) -> None:
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    with force(form):
        assert gradcheck(lambda *x: swiglu(SwiGLUInputs(*x)), (gate, up))


@FORMS
def test_it_is_llamas(form: str) -> None:
    sizes = SimpleNamespace(hidden_size=8, intermediate_size=12, mlp_bias=False, hidden_act="silu")
    mlp, x = LlamaMLP(sizes), torch.randn(3, 8)
    with force(form):
        torch.testing.assert_close(mlp.down_proj(swiglu(SwiGLUInputs(mlp.gate_proj(x), mlp.up_proj(x)))), mlp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_is_bit_equal(dtype: torch.dtype) -> None:
    results = []
    for form in ("reference", "recomputed"):
        torch.manual_seed(0)
        gate, up, grad = torch.randn(3, 64, 33, dtype=dtype)
        gate, up = gate.requires_grad_(), up.requires_grad_()
        with force(form):
            y = swiglu(SwiGLUInputs(gate, up))
        results.append((y, *torch.autograd.grad(y, (gate, up), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputed_keeps_only_its_inputs() -> None:
    gate, up = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        swiglu(SwiGLUInputs(gate, up))
    assert sorted(kept) == sorted((gate.data_ptr(), up.data_ptr()))
