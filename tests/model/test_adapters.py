"""Adapters on any projection of any mixer: no effect at first, then the effect of W + (alpha / rank) B A."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptedPart, AdaptersConfig, adapted_projections
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dropout import DropoutInputs, channel_numbers, dropout, token_numbers
from hybridtron.parallel.adapters import Adapter, AdapterSizes
from hybridtron.proving.audit.cases import ARCHITECTURES, VOCABULARY, small_model

EVERY_PROJECTION = AdaptersConfig(weights=["*"], rank=3, alpha=6.0)


def started(model: ModelConfig) -> LanguageModel:
    language_model = LanguageModel(architecture(model))
    initialise(language_model, seed=0)
    return language_model.double()


def logits(model: LanguageModel, key: int | None = None) -> Tensor:
    """Return logits in a step of training, by its key, or outside of training."""
    tokens = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    return model(tokens, None, replace(SeqInfo.stream(2, 24), key=key)).output


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_start_without_effect_and_equal_merged_weights(name: str) -> None:
    torch.manual_seed(0)
    base = small_model(ARCHITECTURES[name], tied=True, heads={"kv_heads": 2})
    adapted = replace(base, adapters=EVERY_PROJECTION)
    plain = started(base)
    model = started(adapted)
    assert torch.equal(logits(model), logits(plain))
    weights = dict(model.named_parameters())
    for weight_name, parts in adapted_projections(architecture(base).table, EVERY_PROJECTION).items():
        A, B = (weights[f"{weight_name.removesuffix('weight')}adapter.{piece}"] for piece in "AB")
        B.data.normal_(0, 0.1)
        pairs = zip(B.split([part.rows for part in parts]), A.split(3), strict=True)
        plain.get_parameter(weight_name).data += 2.0 * torch.cat([up @ down for up, down in pairs])
    changed = logits(model)
    assert not torch.equal(changed, logits(started(base)))
    torch.testing.assert_close(changed, logits(plain), rtol=1e-9, atol=1e-9)


def test_parts_of_a_fused_projection_have_separate_adapters() -> None:
    base = small_model("W-W", tied=True, heads={"kv_heads": 2})
    values = AdaptersConfig(weights=["layers.2.mixer.kv.weight.v"], rank=3, alpha=6.0)
    table = architecture(replace(base, adapters=values)).table
    A, B = (table[f"layers.2.mixer.kv.adapter.{piece}"] for piece in "AB")
    assert {name for name in table if "adapter" in name} == {f"layers.2.mixer.kv.adapter.{piece}" for piece in "AB"}
    assert A.stored("A") == {"A.v": (3, 32)}
    assert B.stored("B") == {"B.v": (16, 3)}
    model = started(replace(base, adapters=values))
    plain = started(base)
    model.get_parameter("layers.2.mixer.kv.adapter.B").data.fill_(0.1)
    A_v = model.get_parameter("layers.2.mixer.kv.adapter.A")
    plain.get_parameter("layers.2.mixer.kv.weight").data[16:] += 0.2 * A_v.sum(0)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-9, atol=1e-9)


def test_dropout_draws_in_training_alone_and_by_the_key() -> None:
    base = small_model("M-W", tied=True, heads={"kv_heads": 2})
    model = started(replace(base, adapters=replace(EVERY_PROJECTION, dropout=0.4)))
    plain = started(replace(base, adapters=EVERY_PROJECTION))
    for language_model in (model, plain):
        for name, weight in language_model.named_parameters():
            if name.endswith("adapter.B"):
                weight.data.fill_(0.1)
    assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(model, key=1), logits(plain, key=1))
    assert torch.equal(logits(model, key=1), logits(model, key=1))
    assert not torch.equal(logits(model, key=1), logits(model, key=2))
    assert torch.equal(logits(model), logits(plain))  # nothing is left of a training pass


@pytest.mark.parametrize("tokens_first", [True, False])
def test_adapter_dropout_equals_dropout_of_its_inputs(tokens_first: bool) -> None:
    parts = [AdaptedPart("", 5, True)]
    adapter = Adapter("layers.0.mixer.out", AdapterSizes(6, 12, parts, 3, 2.0, dropout=0.4)).double()
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight)
    seq = replace(SeqInfo.stream(2, 7), key=11)
    adapter.begin(adapter, (None, None, seq))
    x_LBC = torch.randn(7, 2, 6, dtype=torch.float64, requires_grad=True)
    if tokens_first:
        ours = adapter.added(x_LBC)
    else:
        ours = adapter.added(x_LBC.transpose(0, 1)).transpose(0, 1)
    seed = seq.number("dropout/layers.0.mixer.out")
    ones = torch.ones_like(x_LBC)
    mask = dropout(DropoutInputs(ones, token_numbers(seed, seq.positions_BL, 0).T, channel_numbers(seed, 12, 6), 0.4))
    expected = 2.0 * (x_LBC * mask) @ adapter.A.T @ adapter.B.T
    torch.testing.assert_close(ours, expected)
    wanted = [x_LBC, adapter.A, adapter.B]
    our_gradients, their_gradients = (torch.autograd.grad(y.sin().sum(), wanted) for y in (ours, expected))
    for actual, theirs in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(actual, theirs)


def dora(W: Tensor, A: Tensor, B: Tensor, M: Tensor) -> Tensor:
    """Return an adapted projection by the paper's formula; the length in the denominator has no gradient."""
    both = W + 2.0 * B @ A
    return (W.norm(dim=1) + M)[:, None] * both / both.norm(dim=1, keepdim=True).detach()


@pytest.mark.parametrize("name", ["samba", "adapters-dora", "rwkv6"])
def test_dora_starts_without_effect_and_equals_its_formula(name: str) -> None:
    base = small_model(ARCHITECTURES[name], tied=True, heads={"kv_heads": 2})
    plain = started(base)
    model = started(replace(base, adapters=replace(EVERY_PROJECTION, dora=True)))
    assert torch.equal(logits(model), logits(plain))
    weights = dict(model.named_parameters())
    for weight_name, parts in adapted_projections(architecture(base).table, EVERY_PROJECTION).items():
        A, B, M = (weights[f"{weight_name.removesuffix('weight')}adapter.{piece}"] for piece in "ABM")
        B.data.normal_(0, 0.1)
        M.data.normal_(0, 0.1)
        rows = [part.rows for part in parts]
        W = plain.get_parameter(weight_name)
        W.data[(W == 0).all(1)] = 0.01  # as those that start from zero have become
        weights[weight_name].data.copy_(W)
        pieces = zip(W.split(rows), A.split(3), B.split(rows), M.split(rows), strict=True)
        W.data.copy_(torch.cat([dora(W, A, B, M) for W, A, B, M in pieces]))
    assert not torch.equal(logits(model), logits(started(base)))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-9, atol=1e-9)


def test_gradients_of_dora_equal_those_of_its_formula() -> None:
    torch.manual_seed(0)
    parts = [AdaptedPart("k", 5, True), AdaptedPart("v", 4, False)]
    adapter = Adapter("layers.0.mixer.kv", AdapterSizes(6, 0, parts, 3, 2.0, dora=True)).double()
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(7, 2, 6, dtype=torch.float64, requires_grad=True)
    W = torch.randn(9, 6, dtype=torch.float64)
    ours = adapter(x, x @ W.T, W)
    expected = torch.cat([x @ dora(W[:5], adapter.A, adapter.B, adapter.M).T, x @ W[5:].T], -1)
    torch.testing.assert_close(ours, expected)
    wanted = [x, adapter.A, adapter.B, adapter.M]
    our_gradients, their_gradients = (torch.autograd.grad(y.sin().sum(), wanted) for y in (ours, expected))
    for actual, theirs in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(actual, theirs)


def test_rows_of_zeros_stay_zero_with_dora() -> None:
    parts = [AdaptedPart("", 2, True)]
    adapter = Adapter("layers.0.mixer.out", AdapterSizes(3, 0, parts, 1, 2.0, dora=True))
    adapter.A.data.fill_(0.5)
    for weight in (adapter.B, adapter.M):
        weight.data.zero_()
    x = torch.randn(4, 1, 3)
    W = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 3.0]])
    y = adapter(x, x @ W.T, W)
    assert torch.equal(y, x @ W.T)
    y.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in adapter.parameters())
