"""Models of the span recipes outside training: read in pieces and token by token, with the results of full rows.

Models of recipes for clusters are narrower here and have fewer layers; their span layers are as shipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.length import position_losses
from hybridtron.inference.generate import generate
from hybridtron.inference.reader import reader
from hybridtron.mixers import span
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.span import SpanInputs

NARROW = ("model.width=48", "model.vocab_size=64", "model.layers.-.hidden=32", "data.path=/data")
RECIPES = {
    "samba_span_laptop": (),
    "samba_span_421m": (*NARROW, "model.pattern=MX-", "model.layers.M.state=4"),
    "laptop_phases": (),
    "mamba2_span_laptop": (),
}
FULL = {"mamba2_span_laptop"}
"""Evaluated with full attention, which reads no blocks."""


def shipped(recipe: str) -> ModelConfig:
    config = load([f"recipe={recipe}", *RECIPES[recipe]])
    return resolve(config)[-1].model


def model_of(recipe: str) -> LanguageModel:
    model = LanguageModel(architecture(shipped(recipe)))
    initialise(model, seed=1)
    return model.double().eval()


def largest_chunk(recipe: str) -> int:
    layers = shipped(recipe).layers.values()
    sizes = next(options["chunk"] for options in layers if options["kind"] == "span")
    if isinstance(sizes, list):
        return max(sizes)
    return sizes


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the chosen blocks in each call that continues from a state."""
    counts = []
    attend = span.span_attention

    def counted(inputs: SpanInputs) -> Tensor:
        if inputs.k_BSGK.shape[1] > inputs.q_BLHK.shape[1]:
            counts.append(sum(int((blocks >= 0).sum()) for blocks in inputs.chosen if blocks is not None))
        return attend(inputs)

    monkeypatch.setattr(span, "span_attention", counted)
    return counts


@torch.no_grad()
def in_pieces(model: LanguageModel, tokens_BL: Tensor, ends: list[int]) -> Tensor:
    """Logits of rows that are read piece by piece."""
    outputs = []
    states = None
    for start, stop in itertools.pairwise([0, *ends]):
        seq = SeqInfo.stream(len(tokens_BL), stop - start, start)
        output, states, *_ = model(tokens_BL[:, start:stop], states, seq)
        outputs.append(output)
    return torch.cat(outputs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_of_any_size_equal_the_whole_row(recipe: str, read: list[int]) -> None:
    """The last tokens one by one, over the border of a chunk."""
    model = model_of(recipe)
    chunk = largest_chunk(recipe)
    length = 2 * chunk + 3
    tokens_BL = torch.randint(model.table["embedding.weight"].shape[0], (1, length))
    whole = in_pieces(model, tokens_BL, [length])
    assert read == []
    ends = [chunk // 3, chunk, chunk + 1, *range(2 * chunk - 3, length + 1)]
    torch.testing.assert_close(in_pieces(model, tokens_BL, ends), whole, rtol=1e-11, atol=1e-12)
    assert (min(read[-6:], default=0) > 0) == (recipe not in FULL)


def test_generation_equals_reading_the_whole_row(read: list[int]) -> None:
    # over a border between chunks
    model = model_of("samba_span_laptop")
    new = 32
    prompt_BL = torch.randint(2048, (2, 100))
    generated = generate(model, prompt_BL, new, temperature=0, seed=0)
    assert min(read) > 0
    tokens_BL = torch.cat((prompt_BL, generated), dim=1)
    logits_LBV = in_pieces(model, tokens_BL, [100 + new])
    assert torch.equal(logits_LBV[99:-1].argmax(-1).T, generated)


@pytest.mark.parametrize("recipe", ["samba_span_laptop", "laptop_phases"])
def test_losses_by_position_do_not_depend_on_the_pieces(recipe: str, read: list[int]) -> None:
    model = model_of(recipe)
    tokens_BT = torch.randint(2048, (2, 201))
    whole = position_losses(reader(model), tokens_BT, 200)
    for piece in (64, 37):
        torch.testing.assert_close(position_losses(reader(model), tokens_BT, piece), whole, rtol=1e-11, atol=1e-11)
    assert max(read) > 0
