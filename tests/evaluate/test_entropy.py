"""Entropies by hand, against whole matrices in float64, within their bounds, and of models in any pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate import entropy
from hybridtron.evaluate.entropy import Selecting, attention_entropy, entropies, span_entropy
from hybridtron.inference.reader import reader
from hybridtron.ops.attention import AttentionInputs, AttentionMemory
from hybridtron.ops.attention.reference import visible_keys, with_memory
from hybridtron.ops.scan import ScanInputs
from hybridtron.ops.span import SpanCut, SpanInputs, SpanSegment
from hybridtron.ops.span.reference import _visible
from tests.conftest import small_model

LENGTH = 37
WIDTH = 4


def heads(length: int, count: int) -> Tensor:
    return 3 * torch.randn(2, length, count, WIDTH, dtype=torch.float64)


def of_matrix(q_BLHK: Tensor, k_BSGK: Tensor, visible: Tensor) -> Tensor:
    """-sum a log a of all scores at once, (B, H, L)."""
    k_BSHK = k_BSGK.repeat_interleave(q_BLHK.shape[2] // k_BSGK.shape[2], dim=2)
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) / WIDTH**0.5
    weights = scores_BHLS.masked_fill(~visible, -torch.inf).softmax(-1)
    return -torch.xlogy(weights, weights).sum(-1)


def test_attention_entropy_equals_an_example_by_hand() -> None:
    """The weights are 1; then 1/4 and 3/4; and 1 again in a window of one key."""
    q = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, math.log(3)], dtype=torch.float64).view(1, 2, 1, 1)
    looked = attention_entropy(AttentionInputs(q, k, k), 0)
    expected = math.log(4) / 4 + 3 / 4 * math.log(4 / 3)
    assert looked.entropy_BHQ.flatten().tolist() == pytest.approx([0, expected])
    assert looked.keys_BHQ.flatten().tolist() == [1, 2]
    assert attention_entropy(AttentionInputs(q, k, k, window=1), 1).entropy_BHQ.item() == pytest.approx(0, abs=1e-12)
    nothing = torch.zeros_like(q)
    assert attention_entropy(AttentionInputs(nothing, k, k), 1).entropy_BHQ.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("scores", [1, 1000, 2**24])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("remembered", [0, 9])
def test_attention_entropy_equals_that_of_the_full_matrix(
    scores: int, window: int | None, documents: bool, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entropy, "SCORES", scores)
    score_counts = []
    looked = entropy._looked

    def counted(q: Tensor, k: Tensor, visible: Tensor) -> entropy.Looked:
        score_counts.append(q[..., 0].numel() * k.shape[1])
        return looked(q, k, visible)

    monkeypatch.setattr(entropy, "_looked", counted)
    memory = AttentionMemory(heads(9, 2), heads(9, 2), torch.tensor([9, 4])) if remembered else None
    borders = torch.arange(LENGTH).div(15, rounding_mode="floor").expand(2, -1) if documents else None
    inputs = AttentionInputs(heads(LENGTH, 4), heads(LENGTH, 2), heads(LENGTH, 2), window, borders, memory)
    keys = with_memory(inputs)
    visible = visible_keys(keys, 0, LENGTH + remembered, LENGTH, window)
    expected = of_matrix(inputs.q_BLHK, keys.keys_BSGK, visible)
    for first in (0, 20):
        measured = attention_entropy(inputs, first)
        torch.testing.assert_close(measured.entropy_BHQ, expected[..., first:], rtol=1e-12, atol=1e-12)
        assert torch.equal(measured.keys_BHQ, visible.sum(-1).expand(2, 4, LENGTH)[..., first:].double())
        assert (measured.entropy_BHQ >= 0).all()
        assert (measured.entropy_BHQ <= measured.keys_BHQ.log() + 1e-12).all()
    assert max(score_counts) <= max(scores, 2 * 4 * (LENGTH + remembered))  # a query of all rows and heads at least


@pytest.mark.parametrize("scores", [1, 2**24])
@pytest.mark.parametrize("shift", [0, 4])
def test_span_entropy_equals_that_of_the_full_matrix(scores: int, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "SCORES", scores)
    segment = SpanSegment(slice(0, 2), 0, LENGTH, seen=16, kept=16)
    cut = SpanCut(8, 2, [segment], shift)
    chunks = len(cut.chunks(segment))
    available = cut.available(segment)
    chosen = torch.stack([torch.randint(-1, most, (2, 2, 3)) for most in available], dim=2)
    assert chunks == chosen.shape[2]
    inputs = SpanInputs(heads(LENGTH, 4), heads(LENGTH + 16, 2), heads(LENGTH + 16, 2), cut, [chosen])
    visible = _visible(cut, segment, chosen, torch.device("cpu")).repeat_interleave(2, dim=1)
    for first in (0, 20):
        measured = span_entropy(inputs, first)
        expected = of_matrix(inputs.q_BLHK, inputs.k_BSGK, visible)[..., first:]
        torch.testing.assert_close(measured.entropy_BHQ, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(measured.keys_BHQ, visible.sum(-1)[..., first:].double())


def selected(steps: list[float], chunk: int) -> tuple[float, float]:
    """Return the entropy and its bound for one channel with these step sizes, fed a chunk at a time."""
    selecting = Selecting()
    before_softplus = torch.tensor(steps, dtype=torch.float64).expm1().log().view(1, -1, 1)
    for part in before_softplus.split(chunk, dim=1):
        selecting.add(ScanInputs(part, part, part[0], part, part, part[0, 0], torch.zeros(1, dtype=torch.float64)))
    value, bound, _ = selecting.means()[0].tolist()
    return value, bound


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_selection_entropy_equals_an_example_by_hand(chunk: int) -> None:
    assert selected([0.5] * 10, chunk) == pytest.approx((math.log(10), math.log(10)))
    assert selected([40.0, *[1e-12] * 9], chunk) == pytest.approx((0, math.log(10)), abs=1e-9)
    expected = math.log(4) / 4 + 3 / 4 * math.log(4 / 3)
    assert selected([1.0, 3.0], chunk) == pytest.approx((expected, math.log(2)))


def test_entropies_of_a_model_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("M-S-W-F-", torch.float64)
    tokens_BL = torch.randint(61, (3, LENGTH))
    whole = entropies(reader(model), tokens_BL, LENGTH, queries=10)
    assert [of_layer.layer for of_layer in whole] == [0, 2, 4, 6]
    assert [of_layer.kind for of_layer in whole] == ["selection"] * 2 + ["attention"] * 2
    assert whole[2].bound == pytest.approx(math.log(8))
    assert whole[3].bound == pytest.approx(sum(math.log(keys) for keys in range(LENGTH - 9, LENGTH + 1)) / 10)
    for of_layer in whole:
        assert 0 < of_layer.least <= of_layer.entropy <= of_layer.greatest <= of_layer.bound + 1e-9
    for chunk in (1, 5, 16):
        for of_layer, expected in zip(entropies(reader(model), tokens_BL, chunk, queries=10), whole, strict=True):
            assert of_layer[2:] == pytest.approx(expected[2:], rel=1e-9)
    assert not any(layer.mixer._forward_pre_hooks for layer in model.layers.values())  # nobody looks any more
    with torch.no_grad():
        model(tokens_BL, None, SeqInfo.stream(*tokens_BL.shape))


def test_models_without_attention_have_no_entropies() -> None:
    assert entropies(reader(small_model("--")), torch.randint(61, (1, 8)), 8) == []
