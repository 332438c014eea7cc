"""RMSNorm and rotary positions, against transformers' Llama and exact integer arithmetic."""

import math
from decimal import Decimal, getcontext

import pytest
import torch
from torch.autograd import gradcheck
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridtron.ops.norm.reference import add_rms_norm, apply_rope, rms_norm, rope_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5, 64, dtype=dtype), torch.randn(64)
    theirs = LlamaRMSNorm(64, eps=1e-5)
    theirs.weight.data.copy_(weight)
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), theirs(x.float()), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum_is_that_of_the_sum_by_itself(dtype: torch.dtype) -> None:
    x, added = (torch.randn(3, 5, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.randn(64, requires_grad=True)
    dsum, dy = torch.randn(2, 3, 5, 64, dtype=dtype)
    summed = x + added
    pairs = (add_rms_norm(x, added, weight, 1e-5), (summed, rms_norm(summed, weight, 1e-5)))
    ours, theirs = ((*p, *torch.autograd.grad(p, (x, added, weight), (dsum, dy), retain_graph=True)) for p in pairs)
    assert all(map(torch.equal, ours, theirs))


def test_gradients() -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4, 6), (6,)))
    added = torch.randn_like(x, requires_grad=True)
    cos, sin = rope_table(torch.arange(3).expand(2, 3), 6, 100.0)
    assert gradcheck(rms_norm, (x, weight, 1e-5))
    assert gradcheck(add_rms_norm, (x, added, weight, 1e-5))
    assert gradcheck(apply_rope, (x, cos, sin))


def test_rope_is_llamas() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    q, k = torch.randn(2, 50, 4, 16), torch.randn(2, 50, 2, 16)
    positions = torch.arange(100).view(2, 50)
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions), unsqueeze_dim=2)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(apply_rope(x, *rope_table(positions, 16, 1e4)), expected, rtol=1e-5, atol=2e-5)


def test_a_table_for_few_channels_turns_the_first_ones() -> None:
    x = torch.randn(2, 50, 4, 16)
    cos, sin = rope_table(torch.arange(100).view(2, 50), 6, 1e4)
    turned = apply_rope(x, cos, sin)
    assert torch.equal(turned[..., :6], apply_rope(x[..., :6], cos, sin))
    assert torch.equal(turned[..., 6:], x[..., 6:])


@pytest.mark.parametrize("position", [0, 2**20 + 1, 12_345_678])
def test_rope_angles_are_exact_at_any_position(position: int) -> None:
    getcontext().prec = 50
    tau = 2 * Decimal("3.14159265358979323846264338327950288419716939937510")
    cos, sin = rope_table(torch.tensor([[position]]), 128, 10000.0)
    for pair in range(64):
        angle = float((position * Decimal(10000) ** (Decimal(-2 * pair) / 128)) % tau)
        assert math.isclose(cos[0, 0, pair], math.cos(angle), abs_tol=1e-7)
        assert math.isclose(sin[0, 0, pair], math.sin(angle), abs_tol=1e-7)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        turned = [apply_rope(x, *rope_table(torch.tensor([[at]]), 32, 1e4)) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert score(2_000_300, 2_000_000) == pytest.approx(score(300, 0), abs=1e-5)
    assert score(300, 0) != pytest.approx(score(301, 0), abs=1e-3)
