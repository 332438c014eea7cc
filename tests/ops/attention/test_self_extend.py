"""Self-Extend against its definition, pair by pair of tokens, with the rotations of transformers' Llama."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridtron.architecture.rope import RopeOptions, SelfExtendOptions
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention
from hybridtron.ops.attention import self_extend as op
from hybridtron.ops.attention.self_extend import Places, self_extended
from hybridtron.ops.rope import RopeInputs, apply_rope, rope_table

HEADS = 4
GROUPS = 2
SIZE = 8
YARN = RopeOptions(100.0, "yarn", 4.0, 16)
THEIRS = {
    None: {"rope_type": "default", "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
}


def rotated(x_LHK: Tensor, positions_L: Tensor, scale: str | None) -> Tensor:
    """Rotate by transformers' own functions."""
    config = LlamaConfig(
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, rope_parameters=dict(THEIRS[scale]),
        max_position_embeddings=64,
    )  # fmt: skip
    table = LlamaRotaryEmbedding(config)(x_LHK[None], positions_L[None])
    return apply_rotary_pos_emb(x_LHK[None], x_LHK[None], *table, unsqueeze_dim=2)[0][0]


def expected(heads: tuple[Tensor, Tensor, Tensor], by: SelfExtendOptions, scale: str | None) -> Tensor:
    """Compute one document's output by the paper's equations, query by query."""
    q, k, v = heads
    places = torch.arange(len(q))
    share = HEADS // GROUPS
    k = k.repeat_interleave(share, 1)
    v = v.repeat_interleave(share, 1)
    group = by.group
    near = by.neighbours
    q_near = rotated(q, places, scale)
    k_near = rotated(k, places, scale)
    q_far = rotated(q, places // group + near - near // group, scale)
    k_far = rotated(k, places // group, scale)
    rows = []
    for i in range(len(q)):
        pairs = [(q_near[i], k_near[j]) if i - j < near else (q_far[i], k_far[j]) for j in range(i + 1)]
        scores_JH = torch.stack([(a * b).sum(-1) for a, b in pairs]) * SIZE**-0.5
        rows.append(torch.einsum("jh,jhk->hk", scores_JH.softmax(0), v[: i + 1]))
    return torch.stack(rows)


def random_heads(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    return torch.randn(length, HEADS, SIZE), *torch.randn(2, length, GROUPS, SIZE)


def turned(x_LHK: Tensor, positions_L: Tensor, rope: RopeOptions) -> Tensor:
    return apply_rope(RopeInputs(x_LHK[None], *rope_table(positions_L[None], SIZE, rope)))


@pytest.mark.parametrize("rope", [RopeOptions(100.0), YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize(("group", "neighbours"), [(3, 5), (2, 1), (4, 16), (8, 7)])
def test_self_extend_equals_its_equations(
    group: int, neighbours: int, rope: RopeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of two documents, the first of which follows remembered tokens; blocks end in mid-document."""
    monkeypatch.setattr(op, "BLOCK", 4)
    by = SelfExtendOptions(group, neighbours)
    first = random_heads(23)
    second = random_heads(18)
    before = 9
    q, k, v = (torch.cat((a[before:], b))[None] for a, b in zip(first, second, strict=True))
    places = torch.cat((torch.arange(before, 23), torch.arange(18)))
    padded = torch.full((1, 2, GROUPS, SIZE), 7.0)  # of a memory that is not full
    memory = AttentionMemory(
        torch.cat((padded, turned(first[1][:before], torch.arange(before), rope)), 1),
        torch.cat((padded, first[2][None, :before]), 1),
        torch.tensor([before]),
    )
    documents = torch.tensor([[0] * (23 - before) + [1] * 18])
    inputs = AttentionInputs(turned(q[0], places, rope), turned(k[0], places, rope), v, None, documents, memory)
    actual = self_extended(inputs, Places(places[None], rope, SIZE), by)[0]
    assert torch.isfinite(actual).all()
    wanted = torch.cat((expected(first, by, rope.scale)[before:], expected(second, by, rope.scale)))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=2e-5)


def test_rows_within_the_neighbours_equal_attention() -> None:
    q, k, v = random_heads(20)
    places = torch.arange(20)
    rope = RopeOptions(100.0)
    inputs = AttentionInputs(turned(q, places, rope), turned(k, places, rope), v[None])
    actual = self_extended(inputs, Places(places[None], rope, SIZE), SelfExtendOptions(4, 20))
    torch.testing.assert_close(actual, attention(inputs), rtol=1e-5, atol=1e-5)
    far = self_extended(inputs, Places(places[None], rope, SIZE), SelfExtendOptions(4, 17))
    torch.testing.assert_close(far[:, :17], actual[:, :17], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(far[:, 19], actual[:, 19], atol=1e-4)
