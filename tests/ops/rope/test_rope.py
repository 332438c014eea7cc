"""Rotary positions against transformers' Llama and exact integer arithmetic."""

import math
from decimal import Decimal, getcontext

import pytest
import torch
from torch.autograd import gradcheck
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridtron.ops.rope import RopeInputs, apply_rope, rope_table


def test_gradients() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(3).expand(2, 3), 6, 100.0)
    assert gradcheck(lambda x: apply_rope(RopeInputs(x, *table)), (x,))


def test_rope_is_llamas() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    q, k = torch.randn(2, 50, 4, 16), torch.randn(2, 50, 2, 16)
    positions = torch.arange(100).view(2, 50)
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions), unsqueeze_dim=2)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(
            apply_rope(RopeInputs(x, *rope_table(positions, 16, 1e4))), expected, rtol=1e-5, atol=2e-5
        )


def test_a_table_for_few_channels_turns_the_first_ones() -> None:
    x = torch.randn(2, 50, 4, 16)
    cos, sin = rope_table(torch.arange(100).view(2, 50), 6, 1e4)
    turned = apply_rope(RopeInputs(x, cos, sin))
    assert torch.equal(turned[..., :6], apply_rope(RopeInputs(x[..., :6], cos, sin)))
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
        tables = (rope_table(torch.tensor([[at]]), 32, 1e4) for at in (query_at, key_at))
        turned = [apply_rope(RopeInputs(x, *table)) for x, table in zip((q, k), tables, strict=True)]
        return float((turned[0] * turned[1]).sum())

    assert score(2_000_300, 2_000_000) == pytest.approx(score(300, 0), abs=1e-5)
    assert score(300, 0) != pytest.approx(score(301, 0), abs=1e-3)
