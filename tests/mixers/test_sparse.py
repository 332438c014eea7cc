"""Sparse attention beside a recurrence: where it is added, its hash and its ranking loss; options that are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.sparse import PATTERNS, RecurrenceSpec
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Export
from hybridtron.config.export_class import export_class
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.model.init import starting_value
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.problems import ConfigError

SIZES = ModelSizes(width=8, num_sublayers=2, layer=3)
LENGTH = 33
BASES = {
    "mamba": {"state": 4},
    "mamba2": {"state": 4, "head_dim": 4, "groups": 2},
}


def spec_of(kind: str, **sparse: object) -> MixerSpec:
    if not sparse:
        return SPECS[kind](**BASES[kind], sparse=None)
    options = {"keys": 6, **sparse}
    if "dilated" in str(sparse.get("pattern")):
        options["stride"] = 3
    return SPECS[kind](**BASES[kind], sparse=options)


def build(spec: MixerSpec) -> Mixer:
    """Build a mixer with the same weights for the same names."""
    mixer = build_mixer(spec, SIZES, SINGLE_RANK)
    for name, weight in mixer.named_parameters():
        weight.data.copy_(starting_value(spec.parameters(SIZES)[name].init, tuple(weight.shape), 1, name))
    return mixer.double()


def in_training(rows: int, length: int, key: int = 7) -> SeqInfo:
    return dataclasses.replace(SeqInfo.stream(rows, length), key=key)


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(length, rows, SIZES.width, dtype=torch.float64)


@pytest.mark.parametrize("kind", BASES)
def test_recurrence_with_sparse_attention_at_gate_zero_is_unchanged_bit_for_bit(kind: str) -> None:
    x = tokens()
    seq = in_training(2, LENGTH)
    alone, beside = (build(spec)(x, None, seq).y_LBD for spec in (spec_of(kind), spec_of(kind, gate=0.0)))
    assert torch.equal(alone, beside)
    assert not torch.equal(alone, build(spec_of(kind, gate=1.0))(x, None, seq).y_LBD)


def test_sparse_attention_is_added_inside_mambas_output_gate() -> None:
    """Worked out with dense attention in a window of all tokens, whose branch is plain causal attention."""
    spec = spec_of("mamba", pattern="window", keys=LENGTH, gate=0.5)
    mixer = build(spec)
    x = tokens()
    seq = in_training(2, LENGTH)
    base = build(spec_of("mamba"))
    weights = dict(mixer.named_parameters())
    x_LBE, z_LBE = (x @ weights["in_proj.weight"].T).chunk(2, dim=-1)
    padded = F.pad(x_LBE.permute(1, 2, 0), (3, 0))
    u_BEL = F.silu(F.conv1d(padded, weights["conv_weight"][:, None], weights["conv_bias"], groups=16))
    u_BLE = u_BEL.transpose(1, 2)
    k_BLN, q_BLN = (u_BLE @ weights["sparse_qk.weight"].T).chunk(2, dim=-1)
    y_BLE = F.scaled_dot_product_attention(q_BLN, k_BLN, u_BLE, is_causal=True)
    added = (0.5 * y_BLE * F.silu(z_LBE.transpose(0, 1))).transpose(0, 1) @ weights["out_proj.weight"].T
    torch.testing.assert_close(mixer(x, None, seq).y_LBD, base(x, None, seq).y_LBD + added, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", BASES)
def test_later_tokens_change_no_earlier_output(kind: str, pattern: str) -> None:
    """Check in training, with several hashes, and outside of it."""
    mixer = build(spec_of(kind, pattern=pattern))
    for key in (None, 1, 2, 3):
        seq = dataclasses.replace(SeqInfo.stream(2, LENGTH), key=key)
        x = tokens()
        changed = torch.cat((x[:20], tokens()[20:]))
        before, after = (mixer(tokens, None, seq).y_LBD[:20] for tokens in (x, changed))
        torch.testing.assert_close(before, after, rtol=0, atol=1e-14)


def test_probe_finds_the_leak_of_centring_over_the_sequence() -> None:
    mixer = build(spec_of("mamba", pattern="lsh", centre="sequence"))
    x = tokens()
    seq = in_training(2, LENGTH)
    changed = torch.cat((x[:20], 9 * tokens()[20:]))
    before, after = (mixer(tokens, None, seq).y_LBD[:20] for tokens in (x, changed))
    assert (before - after).abs().max() > 1e-6


def test_hash_depends_on_key_and_layer_in_training_alone() -> None:
    x = tokens()
    spec = spec_of("mamba", pattern="lsh")
    mixer = build(spec)
    first, again, other = (mixer(x, None, in_training(2, LENGTH, key)).y_LBD for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    outside = SeqInfo.stream(2, LENGTH)
    assert torch.equal(mixer(x, None, outside).y_LBD, mixer(x, None, outside).y_LBD)
    mixer.sparse.layer = 4
    assert not torch.equal(mixer(x, None, in_training(2, LENGTH, 1)).y_LBD, first)


@pytest.mark.parametrize("kind", BASES)
def test_ranking_loss_has_gradients_of_the_scores_alone(kind: str) -> None:
    mixer = build(spec_of(kind, alpha=0.5))
    aux = mixer(tokens(), None, in_training(2, LENGTH)).aux
    assert set(aux) == {"ranking"}
    assert 0 < float(aux["ranking"].detach()) < 0.5 * 2 * math.log(2)
    grads = torch.autograd.grad(aux["ranking"], list(mixer.parameters()), allow_unused=True)
    reached = {name for (name, _), grad in zip(mixer.named_parameters(), grads, strict=True) if grad is not None}
    assert reached == {f"sparse.{name}" for name in ("weight_1", "bias_1", "weight_2", "bias_2", "weight_3")}
    assert mixer(tokens(), None, SeqInfo.stream(2, LENGTH)).aux == {}


def test_carried_keys_are_hashed_again_by_the_new_key() -> None:
    """Training draws a hash for every micro-batch: carried keys find their bins again by the new one."""
    spec = spec_of("mamba2", pattern="lsh", keys=64, hashes=2)  # with room for every key
    mixer = build(spec)
    x = tokens()
    first = mixer(x[:20], None, in_training(2, 20, key=1))
    second = mixer(x[20:], first.state, in_training(2, LENGTH - 20, key=2)).y_LBD
    whole = mixer(x, None, in_training(2, LENGTH, key=2)).y_LBD
    torch.testing.assert_close(second, whole[20:], rtol=1e-10, atol=1e-10)


def model_of(**sparse: object) -> ModelConfig:
    return ModelConfig(16, 32, "MM", {"M": {"kind": "mamba", "state": 4, "sparse": sparse}})


@pytest.mark.parametrize(
    ("sparse", "key", "code"),
    [
        ({"patern": "hax"}, "patern", "unknown-name"),
        ({"pattern": "hux"}, "pattern", "unknown-name"),
        ({"keys": "many"}, "keys", "wrong-type"),
        ({"keys": 0}, "keys", "out-of-range"),
        ({"keys": 7}, "keys", "not-divisible"),
        ({"pattern": "dilated", "keys": 4}, "stride", "missing"),
        ({"pattern": "ks", "stride": 4}, "stride", "no-effect"),
        ({"pattern": "window", "hashes": 4}, "hashes", "no-effect"),
        ({"pattern": "ks", "centre": "sequence"}, "centre", "no-effect"),
        ({"bins": "sign", "hashes": 40}, "hashes", "out-of-range"),
    ],
)
def test_wrong_options_are_refused_by_key_and_code(sparse: dict[str, object], key: str, code: str) -> None:
    with pytest.raises(ConfigError) as refused:
        architecture(model_of(**sparse), 64)
    assert (f"model.layers.M.sparse.{key}", code) in [(p.key, p.code) for p in refused.value.problems]


def test_missing_stride_is_proposed() -> None:
    with pytest.raises(ConfigError) as refused:
        architecture(model_of(pattern="window_dilated", keys=64), 2048)
    (problem,) = refused.value.problems
    assert (problem.key, problem.code) == ("model.layers.M.sparse.stride", "missing")
    assert "64" in problem.message


def test_centring_over_the_sequence_is_warned_about() -> None:
    (spec,) = set(architecture(model_of(centre="sequence"), 64).specs)
    assert isinstance(spec, RecurrenceSpec)
    assert [problem.key for problem in spec.warnings(carried=False)] == ["sparse.centre"]
    assert [problem.key for problem in spec.carry_problems(64)] == ["sparse.centre"]


def test_model_with_sparse_attention_is_exported_by_the_shipped_class() -> None:
    assert export_class(architecture(model_of(keys=8)), Export.auto) == "HybridtronForCausalLM"


def test_parameters_and_flops_equal_those_of_the_paper() -> None:
    """Mamba 130M with HAX: 2 N rows of d_in and 16 N^2 + 6 N of the MLP a layer, and a gate for each channel."""
    base, grown = (SPECS["mamba"](sparse=sparse) for sparse in (None, {"pattern": "hax", "keys": 128}))
    sizes = ModelSizes(768, 24)
    added = sum(p.size for p in grown.parameters(sizes).values()) - sum(p.size for p in base.parameters(sizes).values())
    assert added == 2 * 16 * 1536 + (2 * 32 * 32 + 2 * 32 + 32) + 1536
    flops = {name: value - base.flops(sizes, 2048).get(name, 0) for name, value in grown.flops(sizes, 2048).items()}
    assert flops["sparse"] == 2 * 128 * (16 + 1536) + 2 * 1536
    assert flops["hash"] == 4 * 16 * 128
    assert flops["projections"] == 2 * (2 * 16 * 1536 + 2 * 32 * 32 + 32)
