"""Weights that several places share: one row of the table each, counted once, learning from all places."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.planning.count import count
from hybridtron.problems import ConfigError

BLOCK = {"kind": "shared_attention", "heads": 2, "hidden": 24, "rank": 3, "adapt_attention": True}
LAYERS = {
    "M": {"kind": "mamba2", "state": 4, "head_dim": 8},
    "S": BLOCK,
    "T": BLOCK,
    "P": {"kind": "swiglu", "hidden": 8},
}


def config(pattern: str) -> ModelConfig:
    return ModelConfig(16, 32, pattern, {letter: LAYERS[letter] for letter in LAYERS if letter in pattern})


def built(pattern: str, recompute: Recompute = Recompute.none) -> LanguageModel:
    model = LanguageModel(architecture(config(pattern)), recompute=recompute)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data = (weight.data + 0.1 * torch.randn(weight.shape, generator=generator)).double()
    return model


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    tokens_BL = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(2))
    output = model(tokens_BL, None, SeqInfo.stream(2, 9)).output
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_table_has_every_shared_weight_once_under_the_name_of_the_model() -> None:
    model = built("MSMTMSM")
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(architecture(config("MSMTMSM")).table)
    assert "shared.S.mixer.q.weight" in names
    assert "layers.1.mixer.linear.weight" in names
    assert "layers.1.norm.weight" not in names
    assert model.get_submodule("layers.1.mixer.q") is model.get_submodule("layers.5.mixer.q")
    assert model.get_submodule("layers.1.mixer.q") is not model.get_submodule("layers.3.mixer.q")


def test_shared_block_is_counted_once_and_computes_at_every_place() -> None:
    pattern = "MSMTMSM"
    counted = count(architecture(config(pattern)), 64)
    assert counted.parameters == sum(weight.numel() for weight in built(pattern).parameters())
    first, _, second = (layer for layer in counted.layers if layer.kind == "shared_attention")
    assert second.parameters == 16 * 16 + 3 * (16 + 48) + 3 * 3 * (32 + 32)  # linear, and four low-rank pairs
    assert first.parameters - second.parameters == 4 * 32 * 32 - 32 * 16 + 3 * 16 * 24 + 32 + 16
    assert first.flops == second.flops


def test_gradient_of_a_shared_weight_is_the_sum_over_its_places() -> None:
    """Compare with a model whose places have their own copies: two letters with the same values."""
    once = built("MSMSM")
    apart = built("MSMTM")
    weights = dict(once.named_parameters())
    for name, weight in apart.named_parameters():
        weight.data.copy_(weights[name.replace("shared.T", "shared.S")].data)
    together = gradients(once)
    separate = gradients(apart)
    for name, gradient in together.items():
        twin = name.replace("shared.S", "shared.T")
        expected = separate[name]
        if twin != name:
            expected = expected + separate[twin]
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.layer])
def test_recomputing_shared_blocks_changes_no_bit(recompute: Recompute) -> None:
    expected = gradients(built("SMMSM"))
    recomputed = gradients(built("SMMSM", recompute))
    assert expected.keys() == recomputed.keys()
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(
    "pattern",
    [
        "MMS",  # nothing behind it
        "MSTM",  # T can't read the output of S
        "MS|MM",  # a stage boundary behind it
    ],
)
def test_shared_attention_without_a_reader_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError) as refused:
        architecture(config(pattern))
    assert [(p.key, p.code) for p in refused.value.problems] == [("model.pattern", "misplaced")]


def test_reader_of_shared_attention_without_a_norm_is_refused() -> None:
    model = config("SPM")
    model.layers["P"] = {**LAYERS["P"], "norm_after": True}
    with pytest.raises(ConfigError) as refused:
        architecture(model)
    assert [(p.key, p.code) for p in refused.value.problems] == [("model.pattern", "misplaced")]
