"""The gated norm: its forms against finite differences, transformers' norm, and each other."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from hybridtron.ops.dispatch import force
from hybridtron.ops.gated_norm import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
    gated_norm,
    gated_scale,
    gated_squares,
    norm_before_gate,
)
from hybridtron.ops.norm import RMSNormInputs, rms_norm

FORMS = pytest.mark.parametrize("form", ["reference", "native"])


def inputs(dtype: torch.dtype = torch.float64, rows: int = 2, length: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, z, scale and weight of 4 heads with 5 channels."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y, z = torch.randn(2, rows, length, 4, 5, dtype=dtype)
    scale = torch.rand(rows, length, 4, dtype=wide)
    weight = torch.randn(4, 5, dtype=dtype)
    return tuple(tensor.clone().requires_grad_() for tensor in (y, z, scale, weight))


def normed(y: Tensor, z: Tensor, weight: Tensor, groups: int) -> Tensor:
    return gated_norm(GatedNormInputs(y.flatten(2), z.flatten(2), weight.flatten(), groups, 1e-5))


@FORMS
def test_gradients_are_the_slopes(form: str) -> None:
    y, z, scale, weight = inputs()
    with force(form):
        assert torch.autograd.gradcheck(lambda *x: gated_squares(GatedSquaresInputs(*x)), (y, z))
        assert torch.autograd.gradcheck(lambda *x: gated_scale(GatedScaleInputs(*x)), (y, z, scale, weight))
        for groups in (1, 4):
            whole = functools.partial(normed, groups=groups)
            assert torch.autograd.gradcheck(whole, (y, z, weight))


@FORMS
@pytest.mark.parametrize("groups", [1, 2])
def test_gated_norm_equals_transformers(form: str, groups: int) -> None:
    y, z, _, weight = inputs(torch.float32)
    norm = MambaRMSNormGated(20, 20 // groups, eps=1e-5)
    norm.weight.data = weight.detach().flatten()
    with force(form):
        mean = gated_squares(GatedSquaresInputs(y, z)).unflatten(-1, (groups, -1)).sum(-1) / (20 / groups)
        scale = torch.rsqrt(mean + 1e-5).repeat_interleave(4 // groups, dim=-1)
        ours = gated_scale(GatedScaleInputs(y, z, scale, weight))
        whole = normed(y, z, weight, groups)
    expected = norm(y.flatten(2), z.flatten(2))
    torch.testing.assert_close(ours.flatten(2), expected)
    torch.testing.assert_close(whole, expected)


def test_bf16_is_squared_in_fp32() -> None:
    y, z, _, _ = inputs(torch.bfloat16)
    squares = gated_squares(GatedSquaresInputs(y, z))
    assert squares.dtype == torch.float32
    torch.testing.assert_close(
        squares.double(), gated_squares(GatedSquaresInputs(y.double(), z.double())), rtol=1e-6, atol=1e-6
    )


def test_compiled_form_keeps_the_inputs_alone() -> None:
    y, z, scale, weight = inputs()
    kept: set[int] = set()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.data_ptr()) or x, lambda x: x)
    with hooks, force("native"):
        gated_squares(GatedSquaresInputs(y, z))
        gated_scale(GatedScaleInputs(y, z, scale, weight))
        normed(y, z, weight, groups=2)
    assert kept == {tensor.data_ptr() for tensor in (y, z, scale, weight)}


@pytest.mark.parametrize("form", ["reference", "separate"])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_norm_before_gate_is_the_norm_times_the_gate(form: str, sigmoid: bool) -> None:
    y, z, _, weight = inputs()
    for weights in (weight, weight[0]):
        gate = torch.sigmoid(z) if sigmoid else z * torch.sigmoid(z)
        expected = rms_norm(RMSNormInputs(y, torch.ones_like(y[0, 0, 0]), 1e-5)) * weights * gate

        def gated(y: Tensor, z: Tensor, weights: Tensor) -> Tensor:
            return norm_before_gate(NormBeforeGateInputs(y, z, weights, 1e-5, sigmoid))

        with force(norm_before_gate=form):
            torch.testing.assert_close(gated(y, z, weights), expected)
            leaf = weights.detach().requires_grad_()
            assert torch.autograd.gradcheck(gated, (y, z, leaf))
