"""Rotary positions against transformers' Llama and exact integer arithmetic."""

import math
from decimal import Decimal, getcontext

import pytest
import torch
from torch.autograd import gradcheck
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridtron.architecture.rope import RopeOptions
from hybridtron.interop.rope_parameters import to_ours, to_theirs
from hybridtron.ops.dispatch import force
from hybridtron.ops.native.library import missing
from hybridtron.ops.rope import RopeInputs, apply_rope, frequencies, rope_table


def test_gradients_are_the_slopes() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(3).expand(2, 3), 6, RopeOptions(100.0))
    assert gradcheck(lambda x: apply_rope(RopeInputs(x, *table)), (x,))


def test_rope_equals_llamas() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    q = torch.randn(2, 50, 4, 16)
    k = torch.randn(2, 50, 2, 16)
    positions = torch.arange(100).view(2, 50)
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions), unsqueeze_dim=2)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(
            apply_rope(RopeInputs(x, *rope_table(positions, 16, RopeOptions(1e4)))), expected, rtol=1e-5, atol=2e-5
        )


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn of long rows": {"factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn by all its keys": {
        "factor": 8.0, "original_max_position_embeddings": 300, "beta_fast": 20.0, "beta_slow": 2.0,
        "attention_factor": 1.3, "truncate": False,
    },
    "yarn by mscale": {
        "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.707,
    },
    "yarn in one place": {"factor": 2.0, "original_max_position_embeddings": 1},
    "yarn as long": {"factor": 1.0, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "llama3 of short rows": {
        "factor": 3.0, "original_max_position_embeddings": 50, "low_freq_factor": 0.5, "high_freq_factor": 7.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("head_dim", "base"), [(16, 1e4), (128, 5e5), (12, 1e4)])
def test_scaled_frequencies_equal_transformers(name: str, head_dim: int, base: float) -> None:
    parameters = {"rope_type": name.split()[0], "rope_theta": base, **SCALED[name]}
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters),
        max_position_embeddings=131072,
    )  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    ours = to_ours({"rope_parameters": parameters, "max_position_embeddings": 131072})
    assert isinstance(ours, dict)
    rope = RopeOptions(**ours)
    torch.testing.assert_close(frequencies(rope, head_dim), theirs.double(), rtol=3e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    # and what is rotated, where theirs are near enough to exact: at small positions
    x = torch.randn(2, 50, 2, head_dim)
    positions = torch.arange(100).view(2, 50)
    expected, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, positions), unsqueeze_dim=2)
    actual = apply_rope(RopeInputs(x, *rope_table(positions, head_dim, rope)))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    back = to_ours({"rope_parameters": to_theirs(rope)})
    assert isinstance(back, dict)
    assert RopeOptions(**back) == rope


@pytest.mark.skipif(missing() is not None, reason=f"compiled forms: {missing()}")
def test_yarn_has_the_gradients_of_the_reference() -> None:
    table = rope_table(torch.arange(10).view(2, 5), 6, RopeOptions(100.0, "yarn", 4.0, 8))
    assert float(table[0][0, 0, 0]) == pytest.approx(0.1 * math.log(4) + 1)
    features = torch.randn(2, 5, 3, 8)
    grad = torch.randn(2, 5, 3, 8)
    grads = []
    for name in ("reference", "native"):
        x = features.clone().requires_grad_()
        with force(apply_rope=name):
            apply_rope(RopeInputs(x, *table)).backward(grad)
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_table_for_few_channels_rotates_the_first_ones() -> None:
    x = torch.randn(2, 50, 4, 16)
    cos, sin = rope_table(torch.arange(100).view(2, 50), 6, RopeOptions())
    turned = apply_rope(RopeInputs(x, cos, sin))
    assert torch.equal(turned[..., :6], apply_rope(RopeInputs(x[..., :6], cos, sin)))
    assert torch.equal(turned[..., 6:], x[..., 6:])


@pytest.mark.parametrize("position", [0, 2**20 + 1, 12_345_678])
def test_rope_angles_are_exact_at_any_position(position: int) -> None:
    getcontext().prec = 50
    tau = 2 * Decimal("3.14159265358979323846264338327950288419716939937510")
    cos, sin = rope_table(torch.tensor([[position]]), 128, RopeOptions())
    for pair in range(64):
        angle = float((position * Decimal(10000) ** (Decimal(-2 * pair) / 128)) % tau)
        assert math.isclose(cos[0, 0, pair], math.cos(angle), abs_tol=1e-7)
        assert math.isclose(sin[0, 0, pair], math.sin(angle), abs_tol=1e-7)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        tables = (rope_table(torch.tensor([[at]]), 32, RopeOptions()) for at in (query_at, key_at))
        turned = [apply_rope(RopeInputs(x, *table)) for x, table in zip((q, k), tables, strict=True)]
        return float((turned[0] * turned[1]).sum())

    assert score(2_000_300, 2_000_000) == pytest.approx(score(300, 0), abs=1e-5)
    assert score(300, 0) != pytest.approx(score(301, 0), abs=1e-3)
