"""Parameters, FLOPs and memory, against published sizes, exact counts, and counts made by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from hybridtron.config.architecture import parameter_table
from hybridtron.config.count import count, memory
from hybridtron.config.load import load
from hybridtron.config.schema import Config, ModelConfig, Precision
from hybridtron.specs.attention import AttentionSpec
from hybridtron.specs.base import ModelSizes
from hybridtron.specs.mamba import MambaSpec
from hybridtron.specs.swiglu import SwiGLUSpec

EXACT = {
    "samba_421m": 421_793_280,
    "samba_1.3b": 1_330_207_488,
    "samba_1.7b": 1_742_194_688,
    "samba_3.8b": 3_864_275_712,
    "mamba_swa_mlp_1.6b": 1_655_330_816,
    "mamba_mlp_1.9b": 1_946_224_640,
    "mamba_1.8b": 1_795_295_232,
    "mistral_1.6b": 1_641_187_328,
    "llama3_1.6b": 1_641_187_328,
    "llama2_438m": 438_081_024,
    "llama2_swa_438m": 438_081_024,
    "llama2_1.3b": 1_347_842_304,
    "llama2_swa_1.3b": 1_347_842_304,
    "mamba_432m": 432_804_864,
    "mamba_1.3b": 1_334_740_992,
}

PRINTED = {  # in millions, Tables 5 to 8 of Samba
    "samba_421m_full_0": 449,
    "samba_421m_full_5": 449,
    "samba_421m_full_11": 449,
    "samba_421m_full_1_5": 443,
    "samba_421m_heads_12_2": 426,
    "samba_421m_heads_6_1": 426,
    "samba_421m_heads_12_1": 424,
    "samba_421m_heads_12_4": 431,
    "llama2_swa_438m_heads_12_2": 419,
    "llama2_swa_438m_heads_6_1": 419,
    "llama2_swa_438m_heads_12_1": 414,
    "llama2_swa_438m_heads_12_4": 428,
    "llama2_swa_438m_sc": 438,
    "llama2_438m_seq_2048": 438,
    "llama2_swa_438m_seq_8192": 438,
    "llama2_swa_438m_seq_16384": 438,
    "llama2_swa_438m_seq_32768": 438,
}


@functools.cache
def recipe_config(name: str) -> Config:
    return load([f"recipe={name}"])


@pytest.mark.parametrize(("recipe", "parameters"), EXACT.items())
def test_published_models_have_exactly_their_parameters(recipe, parameters):
    model = recipe_config(recipe).model
    assert count(model, 4096).parameters == parameters
    assert sum(parameter.size for parameter in parameter_table(model).values()) == parameters


@pytest.mark.parametrize(("recipe", "millions"), PRINTED.items())
def test_ablations_have_the_printed_size(recipe, millions):
    assert count(recipe_config(f"ablations/{recipe}").model, 4096).parameters == pytest.approx(millions * 1e6, rel=3e-3)


@pytest.mark.parametrize("recipe", EXACT)
def test_published_steps_have_the_papers_tokens(recipe):
    (phase,) = recipe_config(recipe).phases
    small = phase.tokens in ("20B", "100B")
    assert (phase.seq_len, phase.global_batch, phase.lr) == ((4096, 512, 4e-4) if small else (4096, 2048, 6e-4))


def test_full_attention_stands_in_the_papers_blocks():
    for name, blocks in (("0", [0]), ("5", [5]), ("11", [11]), ("1_5", [1, 5])):
        layers = count(recipe_config(f"ablations/samba_421m_full_{name}").model, 4096).layers
        assert [index // 2 for index, layer in enumerate(layers) if layer.kind == "attention"] == blocks
        assert all("window" not in layer.options for layer in layers)


TINY = ModelConfig(
    width=8,
    vocab_size=11,
    pattern="MW-",
    layers={
        "M": {"kind": "mamba", "state": 3, "dt_rank": 2},
        "W": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 5},
        "-": {"kind": "swiglu", "hidden": 10},
    },
)


def test_projections_by_hand():
    mamba, attention, mlp = count(TINY, 7).layers
    # in 8 -> 32, x_proj 16 -> 2 + 3 + 3, dt_proj 2 -> 16, out 16 -> 8
    assert mamba.flops["projections"] == 2 * (8 * 32 + 16 * 8 + 2 * 16 + 16 * 8)
    assert mamba.flops["conv"] == 2 * 4 * 16
    # q 8 -> 8, k and v 8 -> 4, out 8 -> 8
    assert attention.flops["projections"] == 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)
    # gate, up, down
    assert mlp.flops == {"projections": 2 * 3 * 8 * 10}


def test_parameters_of_layers_by_hand():
    counted = count(TINY, 7)
    mamba, attention, mlp = counted.layers
    assert mamba.parameters == 8 + 8 * 32 + 16 * 4 + 16 + 16 * 8 + 2 * 16 + 16 + 16 * 3 + 16 + 16 * 8
    assert attention.parameters == 8 + 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert mlp.parameters == 8 + 3 * 8 * 10
    assert counted.parameters == mamba.parameters + attention.parameters + mlp.parameters + 8 + 8 * 11


@pytest.mark.parametrize(("seq_len", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 6), (5, 100), (64, 2)])
def test_attention_flops_are_those_of_the_visible_pairs(seq_len, window):
    pairs = sum(
        1
        for query in range(seq_len)
        for key in range(seq_len)
        if key <= query and (window is None or query - key < window)
    )
    spec = AttentionSpec(heads=4, kv_heads=2, window=window)
    # one multiply-add for each of 8 channels in q k^T, and again in the sum over values
    assert spec.flops(ModelSizes(8, 1), seq_len)["attention"] * seq_len == pytest.approx(2 * 2 * 8 * pairs)


def test_totals_are_sums():
    tied, untied = count(TINY, 7), count(dataclasses.replace(TINY, tie_embeddings=False), 7)
    assert tied.head_flops == untied.head_flops == 2 * 8 * 11  # a tied head is a matrix product all the same
    assert untied.parameters - tied.parameters == 8 * 11
    assert tied.forward_flops == pytest.approx(sum(tied.flops_by_part.values()))
    assert tied.flops_per_token == 3 * tied.forward_flops


def test_samba_1_3b_trains_at_8_37_gigaflops_per_token():
    """Worked out apart from this code, from the layers' sizes."""
    assert count(recipe_config("samba_1.3b").model, 4096).flops_per_token == pytest.approx(8.37e9, rel=1e-3)


def test_bf16_memory_by_hand():
    held = memory(TINY, Precision.bf16, seq_len=7, micro_batch=3)
    parameters = count(TINY, 7).parameters
    kept_in_fp32 = 16 + 16 * 3 + 16  # dt_bias, A_log, D
    assert held.weights == 2 * (parameters - kept_in_fp32) + 4 * kept_in_fp32
    assert held.gradients == 4 * parameters
    assert held.optimizer == 8 * parameters + 4 * (parameters - kept_in_fp32)
    sizes = ModelSizes(8, 3)
    specs = (MambaSpec(state=3, dt_rank=2), AttentionSpec(heads=4, kv_heads=2, window=5), SwiGLUSpec(hidden=10))
    values = sum(spec.activation_values(sizes) for spec in specs) + 2 * 8 * 4  # input and output of four norms
    assert held.activations == 2 * values * 7 * 3
    assert held.logits == 7 * 3 * 11 * (2 + 4)
    assert held.total == held.weights + held.gradients + held.optimizer + held.activations + held.logits


def test_fp32_needs_no_master_weights():
    held = memory(TINY, Precision.fp32, seq_len=7, micro_batch=1)
    assert held.weights == held.gradients == held.optimizer // 2 == 4 * count(TINY, 7).parameters


def test_stages_come_from_the_bars():
    model = load(["recipe=samba_421m", "model.pattern=(M-W-)*3|(M-W-)*3"]).model
    assert count(model, 4096).stages == (12, 12)
