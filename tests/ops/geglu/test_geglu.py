"""GEGLU: gradients, and the gated MLP of transformers."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from transformers import Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import Zamba2MLP

from hybridtron.ops.dispatch import force
from hybridtron.ops.geglu import GEGLUInputs, geglu

FORMS = ["reference", "recomputed"]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_slopes(form: str) -> None:
    gate_up = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    with force(geglu=form):
        assert gradcheck(lambda x: geglu(GEGLUInputs(x)), (gate_up,))


@pytest.mark.parametrize("form", FORMS)
def test_geglu_equals_transformers(form: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "adapter_rank": 2, "num_attention_heads": 2}
    config = Zamba2Config(**sizes, num_hidden_layers=1, layers_block_type=["hybrid"])
    mlp = Zamba2MLP(config, num_fwd_mem_blocks=1, block_id=0)
    x = torch.randn(5, 16)
    gate_up = mlp.gate_up_proj(x) + mlp.gate_up_proj_adapter_list[0](x)
    with force(geglu=form):
        torch.testing.assert_close(mlp.down_proj(geglu(GEGLUInputs(gate_up))), mlp(x, 0))


def test_recomputing_form_keeps_its_input_alone() -> None:
    kept = []
    gate_up = torch.randn(4, 6, 32, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.untyped_storage()._cdata), lambda x: x)
    with hooks, force(geglu="recomputed"):
        geglu(GEGLUInputs(gate_up))
    assert set(kept) == {gate_up.untyped_storage()._cdata}
