"""Parameters and FLOPs, against published sizes, exact counts, and counts made by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Export, LrPiece
from hybridtron.config.load import load
from hybridtron.config.schema import Config
from hybridtron.interop.export import target_of
from hybridtron.planning import count as count_file
from hybridtron.planning.count import count, logits_at_a_time, loss_bytes

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
    "sliding_gla_438m": 438_309_120,
    "sliding_gla_1.2b": 1_220_942_592,
    "sliding_retnet_446m": 445_555_200,
    "sliding_retnet_1.4b": 1_411_538_688,
    "mamba_432m": 432_804_864,
    "mamba_1.3b": 1_334_740_992,
}

MAMBA2 = {  # as transformers' Mamba2ForCausalLM counts its own with these sizes; the hybrid by hand, below
    "mamba2_45m": 46_389_312,
    "mamba2_85m": 83_805_792,
    "mamba2_130m": 128_989_632,
    "mamba2_350m": 368_346_624,
    "mamba2_780m": 780_161_280,
    "mamba2_1.3b": 1_343_757_312,
    "mamba2_hybrid_2.7b": 2_697_590_880,
}

NEMOTRON = {"nemotron_3_nano_4b": 3_973_556_832}  # as Megatron Bridge's verification card counts its weights

HYBRIDS = {  # by hand below
    "gdn_hybrid_412m": 412_136_096,
    "gdn_hybrid_1.3b": 1_285_944_608,
    "kda_hybrid_421m": 421_442_960,
    "kda_hybrid_1.3b": 1_301_211_248,
}

# parameters, and those with which a token is computed; tests compare the published ones with transformers' classes
EXPERTS = {
    "nemotron_3_nano_30b": (31_577_940_288, 3_580_076_352),
    "jamba_mini": (51_570_323_328, 12_110_311_296),
    "samba_moe_1.3b_a0.4b": (1_313_902_272, 422_088_384),  # by hand below
    "granite4_h_tiny": (6_939_037_248, 1_465_470_528),
    "granite4_h_small": (32_207_337_984, 8_803_121_664),
    "qwen3_next_80b": (79_674_391_296, 3_874_929_408),
    "qwen3.5_0.8b": (752_393_024, 752_393_024),
    "qwen3.5_4b": (4_205_751_296, 4_205_751_296),
    "qwen3.5_9b": (8_953_803_264, 8_953_803_264),
    "qwen3.5_35b_a3b": (34_660_610_688, 3_454_988_928),
}

MAMBA3 = {"mamba3_swa_421m": 421_316_160, "mamba3_swa_1.3b": 1_326_644_496}  # by hand below

CONVOLVED = {  # four taps for each channel of queries, keys and values, in nine layers
    "sliding_gla_1.2b": (1152, 1152, 2304),
    "sliding_retnet_1.4b": (2304, 2304, 4608),
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
    "sliding_gla_438m_sc": 438,
    "sliding_gla_438m_swa_sc": 438,
    "sliding_retnet_446m_sc": 446,
    "sliding_retnet_446m_swa_sc": 446,
    "llama2_438m_seq_2048": 438,
    "llama2_swa_438m_seq_8192": 438,
    "llama2_swa_438m_seq_16384": 438,
    "llama2_swa_438m_seq_32768": 438,
}


@functools.cache
def recipe_config(name: str) -> Config:
    return load([f"recipe={name}"])


@pytest.mark.parametrize(("recipe", "parameters"), (EXACT | MAMBA2 | NEMOTRON).items())
def test_published_models_have_their_exact_parameters(recipe, parameters):
    model = recipe_config(recipe).model
    assert count(architecture(model), 4096).parameters == parameters
    assert sum(parameter.size for parameter in architecture(model).table.values()) == parameters


@pytest.mark.parametrize(("recipe", "parameters"), EXPERTS.items())
def test_models_with_experts_have_the_exact_parameters_of_the_published(recipe, parameters):
    counted = count(architecture(recipe_config(recipe).model), 4096)
    assert (counted.parameters, counted.active) == parameters


def test_samba_with_experts_has_its_hand_counted_parameters():
    """samba_421m without its MLPs, with a shared expert, a router and a correction in each of 12 layers."""
    without = EXACT["samba_421m"] - 12 * 3 * 1536 * 4096 + 12 * (3 * 1536 * 1792 + 16 * 1536 + 16)
    experts = [12 * count * 3 * 1536 * 1152 for count in (16, 2)]
    assert EXPERTS["samba_moe_1.3b_a0.4b"] == (without + experts[0], without + experts[1])


@pytest.mark.parametrize(("recipe", "millions"), PRINTED.items())
def test_ablations_have_the_printed_sizes(recipe, millions):
    assert count(architecture(recipe_config(f"ablations/{recipe}").model), 4096).parameters == pytest.approx(
        millions * 1e6, rel=3e-3
    )


@pytest.mark.parametrize(("recipe", "channels"), CONVOLVED.items())
def test_short_convolutions_add_hand_counted_parameters(recipe, channels):
    convolved = EXACT[recipe] + 9 * 4 * sum(channels)
    assert count(architecture(recipe_config(f"ablations/{recipe}_sc").model), 4096).parameters == convolved
    attention = 9 * 4 * 3 * 2304  # as many keys and values as queries
    assert (
        count(architecture(recipe_config(f"ablations/{recipe}_swa_sc").model), 4096).parameters == convolved + attention
    )


@pytest.mark.parametrize("recipe", EXACT)
def test_published_steps_have_the_tokens_of_the_paper(recipe):
    phases = recipe_config(recipe).phases
    rows = 2048
    lr = 6e-4
    if phases[0].tokens in ("20B", "100B"):
        rows = 512
        lr = 4e-4
    assert {(phase.seq_len, phase.global_batch) for phase in phases} == {(4096, rows)}
    assert phases[0].lr == lr


def test_phases_of_samba_3_8b_have_the_tokens_of_phi_3():
    phases = recipe_config("samba_3.8b").phases
    assert [phase.tokens for phase in phases] == ["2.2T", "1T"]  # 3.2T together
    assert phases[1].lr_piece is LrPiece.carry_on


@pytest.mark.parametrize(
    ("recipe", "lr"),
    list(zip(MAMBA2, (1e-3, 1e-3, 6e-4, 3e-4, 2.5e-4, 2e-4, 1.6e-4), strict=True)),
)
def test_mamba2_steps_equal_those_of_table_2(recipe, lr):
    config = recipe_config(recipe)
    (phase,) = config.phases
    assert (phase.seq_len, phase.lr) == (2048, lr)
    assert phase.lr * config.optim.final_lr == pytest.approx(1e-5, rel=1e-4)
    tokens = 2**19
    if recipe == "mamba2_hybrid_2.7b":
        tokens = 2**20
    assert phase.seq_len * phase.global_batch == tokens


def test_mamba2_hybrid_has_the_attention_layers_of_mamba2attn():
    counted = count(architecture(recipe_config("mamba2_hybrid_2.7b").model), 2048)
    kinds = [layer.kind for layer in counted.layers]
    assert [index for index, kind in enumerate(kinds) if kind == "attention"] == [9, 18, 27, 36, 45, 56]
    assert len(kinds) == 64
    # norm; z, x, B, C, dt; convolution with bias; dt_bias, A_log, D; gated norm; out
    mamba = 2560 + 2560 * (2 * 5120 + 2 * 128 + 80) + 5 * (5120 + 2 * 128) + 3 * 80 + 5120 + 5120 * 2560
    # norm; q, k, v and out; convolution with bias
    attention = 2560 + 4 * 3840 * 2560 + 5 * 3 * 3840
    assert counted.parameters == 58 * mamba + 6 * attention + 2560 + 50288 * 2560


@pytest.mark.parametrize(("recipe", "parameters"), HYBRIDS.items())
def test_delta_rule_hybrids_have_hand_counted_parameters(recipe, parameters):
    model = recipe_config(recipe).model
    counted = count(architecture(model), 4096)
    width = model.width
    heads = model.width // 128
    kinds = [layer.kind for layer in counted.layers]
    if recipe.startswith("gdn"):
        kind = "gated_deltanet"
        hidden = width * 11 // 4
        # norm; q and k of 96, v, z and out of 192 channels a head; four taps; a and b; dt_bias and A_log; heads' norm
        delta = width + heads * (768 * width + 4 * 384 + 2 * width + 2) + 192
    else:
        kind = "kda"
        hidden = width * 13 // 4
        # norm; q, k, v and out of 128 channels a head; four taps; b; dt_bias and A_log; into 128 for decays and gate,
        # and from there to 128 each a head; the heads' norm
        delta = width + heads * (512 * width + 4 * 384 + width + 129 + 2 * 128**2) + 2 * 128 * width + 128
    assert kinds == [*[kind, "swiglu"] * 3, "attention", "swiglu"] * (len(kinds) // 8)
    attention = width + 4 * width**2
    mlp = width + 3 * width * hidden
    groups = len(kinds) // 8 * (3 * delta + attention + 4 * mlp)
    assert counted.parameters == groups + width + 2 * 32000 * width == parameters


@pytest.mark.parametrize(("recipe", "parameters"), EXPERTS.items())
def test_published_hybrids_of_granite_and_qwen_have_their_exact_parameters(recipe, parameters):
    arch = architecture(recipe_config(recipe).model)
    counted = count(arch, 4096)
    assert (counted.parameters, counted.active) == parameters
    assert sum(parameter.size for parameter in arch.table.values()) == parameters[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(EXPERTS.keys() - {"samba_moe_1.3b_a0.4b"}))  # transformers has no such class
def test_published_hybrids_have_the_parameters_that_transformers_counts(recipe):
    """Build the model in transformers, without memory for it, from the config.json that an export would have."""
    transformers = pytest.importorskip("transformers")
    arch = architecture(recipe_config(recipe).model)
    target = target_of(arch, Export.native)
    config = transformers.CONFIG_MAPPING[target.model_type](**target.config(arch, 4096))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    corrections = [buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(weight.numel() for weight in [*theirs.parameters(), *corrections]) == EXPERTS[recipe][0]


def test_ablations_have_full_attention_in_the_blocks_of_the_paper():
    for name, blocks in (("0", [0]), ("5", [5]), ("11", [11]), ("1_5", [1, 5])):
        layers = count(architecture(recipe_config(f"ablations/samba_421m_full_{name}").model), 4096).layers
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


def test_flops_of_projections_equal_hand_counts():
    mamba, attention, mlp = count(architecture(TINY), 7).layers
    # in 8 -> 32, x_proj 16 -> 2 + 3 + 3, dt_proj 2 -> 16, out 16 -> 8
    assert mamba.flops["projections"] == 2 * (8 * 32 + 16 * 8 + 2 * 16 + 16 * 8)
    assert mamba.flops["conv"] == 2 * 4 * 16
    # q 8 -> 8, k and v 8 -> 4, out 8 -> 8
    assert attention.flops["projections"] == 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)
    # gate, up, down
    assert mlp.flops == {"projections": 2 * 3 * 8 * 10}


def test_flops_of_mamba2_equal_hand_counts():
    layers = {"M": {"kind": "mamba2", "state": 3, "head_dim": 4, "groups": 2}}
    (mamba,) = count(architecture(dataclasses.replace(TINY, pattern="M", layers=layers)), 200).layers
    # in 8 -> z 16, x 16, dt 4 heads, B and C 2 groups of 3 each; out 16 -> 8
    assert mamba.flops["projections"] == 2 * (8 * (16 + 16 + 4 + 6 + 6) + 16 * 8)
    assert mamba.flops["conv"] == 2 * 4 * (16 + 12)
    # of 128 tokens each: their scores in 2 groups, the sum over values; into the state and out of it
    assert mamba.flops["ssd"] == 2 * 128 * (2 * 3 + 16) + 2 * 2 * 3 * 16


@pytest.mark.parametrize(("recipe", "parameters"), MAMBA3.items())
def test_mamba3_hybrids_have_hand_counted_parameters(recipe, parameters):
    model = recipe_config(recipe).model
    # 64 channels, of twice the width
    counted = count(architecture(model), 4096)
    width = model.width
    heads = model.width // 32
    kinds = [layer.kind for layer in counted.layers]
    assert kinds == ["mamba3", "swiglu", "attention", "swiglu"] * (len(kinds) // 4)
    # norm; z, x and out; dt, A, trap; B and C; 32 angles; dt_bias and D, biases of B and C; norms of B and C, and of y
    mamba = width + 6 * width**2 + 3 * heads * width + 2 * 128 * width + 32 * width
    mamba += 2 * heads + 2 * heads * 128 + 2 * 128 + 2 * width
    attention = width + 4 * width**2
    mlp = width + 3 * width * (width * 8 // 3)
    assert counted.parameters == len(kinds) // 4 * (mamba + attention + 2 * mlp) + width + 32000 * width == parameters


def test_flops_of_mamba3_equal_hand_counts():
    """Count the matrices in a chunk of 128 tokens, for each of 4 heads with 6 states and 4 channels."""
    layers = {"M": {"kind": "mamba3", "state": 6, "head_dim": 4}}
    (mamba,) = count(architecture(dataclasses.replace(TINY, pattern="M", layers=layers)), 200).layers
    # in 8 -> z 16, x 16, dt 4, A 4, trap 4, B 6, C 6, one angle; out 16 -> 8
    assert mamba.flops["projections"] == 2 * (8 * (16 + 16 + 4 + 4 + 4 + 6 + 6 + 1) + 16 * 8)
    # C B^T and its product with x; B x^T, and C h
    inside = 128**2 * (6 + 4)
    through_state = 2 * 128 * 6 * 4
    assert mamba.flops["ssd"] * 128 == 4 * 2 * (inside + through_state)
    assert mamba.flops["turns"] == 4 * 2 * 6  # a pair of B and one of C


def test_flops_of_gated_deltanet_equal_hand_counts():
    """Count the matrices in a chunk of 64 tokens, for each of 4 heads with 3 keys and 2 values."""
    layers = {"M": {"kind": "gated_deltanet", "heads": 4, "key_heads": 2, "expand_k": 0.75, "expand_v": 1.0}}
    (delta,) = count(architecture(dataclasses.replace(TINY, pattern="M", layers=layers)), 200).layers
    # in 8 -> q 6, k 6, v 8, z 8, a 4 and b 4; out 8 -> 8
    assert delta.flops["projections"] == 2 * (8 * (6 + 6 + 8 + 8 + 4 + 4) + 8 * 8)
    assert delta.flops["conv"] == 2 * 4 * (6 + 6 + 8)
    # of k k^T and q k^T; the inverse, by k and by v
    scores = 2 * 64**2 * 3
    solved = 64**3 / 3 + 64**2 * (3 + 2)
    # scores by what is written; state by k and q, k by what is written
    read = 64**2 * 2
    through_state = 3 * 64 * 3 * 2
    assert delta.flops["gated_deltanet"] * 64 == pytest.approx(4 * 2 * (scores + solved + read + through_state))


def test_parameters_of_layers_equal_hand_counts():
    counted = count(architecture(TINY), 7)
    mamba, attention, mlp = counted.layers
    assert mamba.parameters == 8 + 8 * 32 + 16 * 4 + 16 + 16 * 8 + 2 * 16 + 16 + 16 * 3 + 16 + 16 * 8
    assert attention.parameters == 8 + 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert mlp.parameters == 8 + 3 * 8 * 10
    assert counted.parameters == mamba.parameters + attention.parameters + mlp.parameters + 8 + 8 * 11


@pytest.mark.parametrize(("seq_len", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 6), (5, 100), (64, 2)])
def test_flops_of_attention_count_the_visible_pairs(seq_len, window):
    pairs = sum(
        1
        for query in range(seq_len)
        for key in range(seq_len)
        if key <= query and (window is None or query - key < window)
    )
    spec = AttentionSpec(heads=4, kv_heads=2, window=window)
    # one multiply-add for each of 8 channels in q k^T, and again in the sum over values
    assert spec.flops(ModelSizes(8, 1), seq_len)["attention"] * seq_len == pytest.approx(2 * 2 * 8 * pairs)


def test_totals_are_sums_over_layers_and_head():
    tied = count(architecture(TINY), 7)
    untied = count(architecture(dataclasses.replace(TINY, tie_embeddings=False)), 7)
    assert tied.head_flops == untied.head_flops == 2 * 8 * 11  # a tied head is a matrix product all the same
    assert untied.parameters - tied.parameters == 8 * 11
    assert tied.forward_flops == pytest.approx(sum(tied.flops_by_part.values()))
    assert tied.flops_per_token == 3 * tied.forward_flops


def test_samba_1_3b_trains_at_8_37_gigaflops_per_token():
    """Worked out apart from this code, from the layers' sizes."""
    assert count(architecture(recipe_config("samba_1.3b").model), 4096).flops_per_token == pytest.approx(
        8.37e9, rel=1e-3
    )


def test_logits_are_computed_for_a_bounded_number_of_tokens(monkeypatch):
    assert logits_at_a_time(10**6, 32_000, 2) == 4185  # 239 times, of the 4194 that there is room for
    monkeypatch.setattr(count_file, "LOGITS_BYTES", 4 * 5 * 2)
    assert logits_at_a_time(4, 5, 2) == 4
    assert logits_at_a_time(5, 5, 2) == 3
    assert logits_at_a_time(5, 500, 2) == 1
    assert loss_bytes(4, 3, 5, 2) == 2 * (4 * 5 + 4 * 3 + 5 * 3)
    assert loss_bytes(10, 3, 5, 2) == 2 * (4 * 5 + 10 * 3) + 4 * 5 * 3  # the head's is added up in fp32
    assert loss_bytes(10, 3, 5, 4) == 4 * (2 * 5 + 10 * 3 + 5 * 3)


def test_bars_of_a_pattern_are_stage_boundaries():
    model = load(["recipe=samba_421m", "model.pattern=(M-W-)*3|(M-W-)*3"]).model
    assert architecture(model).stages == (12, 12)
