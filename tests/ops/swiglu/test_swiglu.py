"""The SwiGLU gate: both forms against finite differences, transformers and each other."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from transformers import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from hybridtron.ops.dispatch import force
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu

FORMS = pytest.mark.parametrize("form", ["reference", "recomputed", "native"])


@FORMS
@pytest.mark.parametrize("multiplier", [1.0, 0.7])
def test_gradients_are_the_slopes(form: str, multiplier: float) -> None:
    gate_up = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    with force(form):
        assert gradcheck(lambda x: swiglu(SwiGLUInputs(x, multiplier)), (gate_up,))


@FORMS
def test_swiglu_equals_llamas(form: str) -> None:
    sizes = SimpleNamespace(hidden_size=8, intermediate_size=12, mlp_bias=False, hidden_act="silu")
    mlp = LlamaMLP(sizes)
    x = torch.randn(3, 8)
    with force(form):
        gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
        torch.testing.assert_close(mlp.down_proj(swiglu(SwiGLUInputs(gate_up))), mlp(x))


@FORMS
def test_swiglu_with_a_multiplier_equals_falcon_h1(form: str) -> None:
    """The gate has a multiplier."""
    config = FalconH1Config(hidden_size=8, intermediate_size=12, mlp_multipliers=[0.7, 1.0])
    mlp = FalconH1MLP(config)
    x = torch.randn(3, 8)
    with force(form):
        gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
        torch.testing.assert_close(mlp.down_proj(swiglu(SwiGLUInputs(gate_up, 0.7))), mlp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplier", [1.0, 0.7])
def test_recomputing_form_equals_the_reference_bit_for_bit(dtype: torch.dtype, multiplier: float) -> None:
    results = []
    for form in ("reference", "recomputed"):
        torch.manual_seed(0)
        gate_up = torch.randn(64, 66, dtype=dtype, requires_grad=True)
        grad = torch.randn(64, 33, dtype=dtype)
        with force(form):
            y = swiglu(SwiGLUInputs(gate_up, multiplier))
        results.append((y, *torch.autograd.grad(y, gate_up, grad)))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


@pytest.mark.parametrize("form", ["recomputed", "native"])
def test_swiglu_keeps_its_input_alone(form: str) -> None:
    gate_up = torch.randn(4, 8, requires_grad=True)
    kept: list[Tensor] = []
    with force(form), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        swiglu(SwiGLUInputs(gate_up))
    assert {x.untyped_storage().data_ptr() for x in kept} == {gate_up.untyped_storage().data_ptr()}
