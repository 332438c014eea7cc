"""Tokens by the compiled call against the model itself, which reads them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.inference.compiled_decode import CompiledDecode, as_ring, unsupported_reason
from hybridtron.inference.generate import Prompts, continue_prompts
from hybridtron.inference.reader import Reader, reader
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.ops.native.library import missing
from tests.slow import slow_except

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"compiled forms: {missing()}")
LAYERS = {
    "M": {"kind": "mamba", "state": 5, "conv": 3, "dt_rank": 3},
    "N": {"kind": "mamba", "state": 4},
    "J": {"kind": "mamba", "state": 4, "inner_norm": "plain", "norm_eps": 0.01},
    "K": {"kind": "mamba", "state": 5, "dt_rank": 3, "inner_norm": "learned"},
    "W": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 8},
    "V": {"kind": "attention", "heads": 2, "window": 2, "head_dim": 10, "rotary_dim": 6},
    "U": {"kind": "attention", "heads": 4, "kv_heads": 1, "window": 30, "rope": "none"},
    "Y": {"kind": "attention", "heads": 2, "window": 9, "rope": {"scale": "yarn", "factor": 4.0, "original": 8}},
    "F": {"kind": "attention", "heads": 4},
    "-": {"kind": "swiglu", "hidden": 48},
}


def model_of(pattern: str, dtype: torch.dtype = torch.float64, tied: bool = True, width: int = 32) -> LanguageModel:
    model = LanguageModel(
        architecture(ModelConfig(width=width, vocab_size=61, pattern=pattern, layers=LAYERS, tie_embeddings=tied))
    )
    initialise(model, seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    return model.to(dtype)


def prompts() -> Prompts:
    """Shorter than a window, as long, and longer; of unequal length, so that rows are padded."""
    return Prompts.of([torch.randint(61, (length,)).tolist() for length in (1, 3, 8, 9, 40)])


@torch.no_grad()
def logits_of(read: Reader, texts: Prompts, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    _, states = texts.read(read.read, 7)
    following = read.steps(states, texts.tokens_BL.shape[1] - texts.starts_B)
    assert isinstance(following, CompiledDecode) == (read.model is not None)
    for step in tokens:
        yield following(step).clone()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pattern", ["M", "N", "W", "V", "U", "Y", "-", "J", "K", "M-W-N-V-U-J-K"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), slow_except([(torch.float64, 1e-6), (torch.float32, 2e-4)], (torch.float64, 1e-6))
)
def test_compiled_decoding_have_the_logits_of_the_model(
    pattern: str, dtype: torch.dtype, tolerance: float, tied: bool
) -> None:
    """Read past the end of every window. Angles of positions are computed in fp32 for any dtype of the model."""
    model = model_of(pattern, dtype, tied)
    texts = prompts()
    tokens = torch.randint(61, (35, 5))
    compiled = reader(model)
    plain = replace(reader(model), model=None)
    for actual, expected in zip(logits_of(compiled, texts, tokens), logits_of(plain, texts, tokens), strict=True):
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def test_compiled_decoding_generate_the_text_of_the_model() -> None:
    model = model_of("M-W-N-V-")
    texts = prompts()
    compiled = list(islice(continue_prompts(reader(model), texts), 40))
    assert compiled == list(islice(continue_prompts(replace(reader(model), model=None), texts), 40))


def test_compiled_decoding_do_not_change_the_states_before_them() -> None:
    model = model_of("M-W-")
    texts = prompts()
    with torch.no_grad():
        _, states = texts.read(reader(model).read, 100)
        before = {layer: {name: part.clone() for name, part in state.items()} for layer, state in states.items()}
        positions_B = texts.tokens_BL.shape[1] - texts.starts_B
        following = reader(model).steps(states, positions_B)
        first = following(torch.arange(5)).clone()
        again = reader(model).steps(states, positions_B)(torch.arange(5))
    assert torch.equal(first, again)
    for layer, state in before.items():
        assert all(torch.equal(states[layer][name], part) for name, part in state.items())


def test_ring_holds_every_token_at_its_place() -> None:
    past_BMGK = torch.arange(3.0).view(1, 3, 1, 1) + torch.tensor([4, 7]).view(2, 1, 1, 1)  # of tokens 4-6 and 7-9
    ring = as_ring(past_BMGK, torch.tensor([7, 10])).squeeze()
    assert [ring[0, place % 4].item() for place in (4, 5, 6)] == [4, 5, 6]
    assert [ring[1, place % 4].item() for place in (7, 8, 9)] == [7, 8, 9]


def multiplied() -> LanguageModel:
    model = model_of("M-")
    model.logits_scaling = 8.0
    return model


def with_scaled_attention() -> LanguageModel:
    model = model_of("W-")
    mixer = model.layers["0"].mixer
    mixer.heads = replace(mixer.heads, scale=0.1)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (multiplied, "multipliers"),
        (with_scaled_attention, "windowed"),
        (lambda: model_of("M-F-"), "windowed"),
        (lambda: model_of("M-", width=40), "sizes that 16 divides"),
        (lambda: model_of("M-", torch.bfloat16), "bfloat16"),
    ],
)
def test_unsupported_models_run_without_compiled_decoding(model, reason: str) -> None:
    read = reader(model())
    texts = prompts()
    assert reason in (unsupported_reason(read.model) or "")
    assert len(list(islice(continue_prompts(read, texts), 3))) == 3


def test_large_models_run_without_compiled_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtron.inference.compiled_decode.MOST_BYTES", 1000)
    assert "MiB" in (unsupported_reason(model_of("M-")) or "")


def test_forced_ops_run_without_compiled_decoding() -> None:
    assert unsupported_reason(model_of("M-")) is None
    with force(selective_scan="reference"):
        assert unsupported_reason(model_of("M-")) is not None
