"""muP's rules: initial values and learning rates from the tables of the model and its base model, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.inits import EachExpert, Normal, Projection, RowFactors, Uniform
from hybridtron.architecture.model import ModelConfig, Start
from hybridtron.architecture.mup import MupConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.check import check
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import OptimConfig
from hybridtron.model.init import starting_value
from hybridtron.problems import ConfigError
from tests.conftest import small_run

LAYERS: dict[str, dict[str, Any]] = {
    "F": {"kind": "attention", "heads": 4},
    "H": {"kind": "attention", "heads": 8, "kv_heads": 4, "head_dim": 16},
    "1": {"kind": "attention", "heads": 8, "kv_heads": 1, "head_dim": 16},
    "-": {"kind": "swiglu", "hidden": 352},
    "q": {"kind": "squared_relu", "hidden": 512},
    "M": {"kind": "mamba"},
    "r": {"kind": "mamba", "dt_rank": 4},
    "S": {"kind": "mamba2", "state": 16, "head_dim": 16},
    "e": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 128, "shared": 64, "shared_gate": True},
    "D": {"kind": "gated_deltanet", "heads": 8, "key_heads": 4, "expand_k": 0.5, "expand_v": 1.0},
}
BASE = 32
WIDTH = 128
GROWTH = WIDTH / BASE


def model(base: int | None = BASE, **changes: Any) -> ModelConfig:
    pattern = "".join(LAYERS)
    config = ModelConfig(WIDTH, 64, pattern, LAYERS, tie_embeddings=False, mup=MupConfig(base))
    return replace(config, **changes)


def sub_layer(arch: Architecture, letter: str, name: str) -> Any:
    return arch.table[f"layers.{arch.letters.index(letter)}.mixer.{name}"]


def bound_of(init: Any) -> float:
    if isinstance(init, EachExpert):
        init = init.init
    assert isinstance(init, Uniform)
    return init.bound


@pytest.mark.parametrize(
    ("letter", "name", "base_inputs"),
    [
        ("F", "q.weight", BASE),
        ("F", "kv.weight", BASE),
        ("H", "q.weight", BASE),
        ("H", "kv.weight", BASE),
        ("-", "gate_up.weight", BASE),
        ("q", "up.weight", BASE),
        ("M", "in_proj.weight", BASE),
        ("M", "dt_proj.weight", 2),
        ("S", "in_proj.weight", BASE),
        ("D", "in_proj.weight", BASE),
        ("D", "ab_proj.weight", BASE),
        ("e", "gate_up", BASE),
        ("e", "shared_gate_up.weight", BASE),
    ],
)
def test_matrices_that_grow_both_ways(letter: str, name: str, base_inputs: int) -> None:
    weight = sub_layer(architecture(model()), letter, name)
    assert weight.lr_factor == 1 / GROWTH
    assert bound_of(weight.init) == pytest.approx((base_inputs * GROWTH) ** -0.5)


@pytest.mark.parametrize(
    ("letter", "name"), [("1", "kv.weight"), ("S", "bc_proj.weight"), ("e", "router"), ("e", "shared_gate")]
)
def test_matrices_with_a_fixed_number_of_outputs(letter: str, name: str) -> None:
    weight = sub_layer(architecture(model()), letter, name)
    assert weight.lr_factor == 1 / GROWTH
    assert bound_of(weight.init) == pytest.approx(BASE**-0.5 / GROWTH)


@pytest.mark.parametrize(
    ("letter", "name"),
    [
        ("M", "conv_weight"),
        ("M", "A_log"),
        ("M", "D"),
        ("M", "dt_bias"),
        ("S", "norm_weight"),
        ("D", "conv_weight"),
        ("r", "dt_proj.weight"),
    ],
)
def test_weights_without_growing_inputs_keep_init_and_rate(letter: str, name: str) -> None:
    transferred = sub_layer(architecture(model()), letter, name)
    assert transferred == sub_layer(architecture(model(base=None)), letter, name)
    assert transferred.lr_factor == 1


@pytest.mark.parametrize("start", Start)
def test_embedding_keeps_its_init_and_the_head_shrinks(start: Start) -> None:
    arch = architecture(model(init=start))
    base = architecture(model(base=None, init=start, width=BASE)).table
    assert arch.table["embedding.weight"].init == base["embedding.weight"].init
    assert arch.table["embedding.weight"].lr_factor == 1
    head = arch.table["head.weight"]
    assert head.lr_factor == 1 / GROWTH
    if start is Start.mamba:
        assert bound_of(head.init) == pytest.approx(BASE**-0.5 / GROWTH)
    else:
        assert head.init == Normal(pytest.approx((2 / (5 * BASE)) ** 0.5 / GROWTH))


def test_parts_of_a_fused_matrix_have_their_own_deviations() -> None:
    """Mamba's dt grows with the width, B and C do not."""
    weight = sub_layer(architecture(model()), "M", "x_proj.weight")
    assert weight.init == RowFactors(
        Projection((2 * BASE) ** -0.5), ((8, GROWTH**-0.5), (16, 1 / GROWTH), (16, 1 / GROWTH))
    )
    value = starting_value(weight.init, weight.shape, seed=1, name="x")
    dt, state = value[:8], value[8:]
    assert dt.abs().max().item() == pytest.approx((2 * WIDTH) ** -0.5, rel=0.01)
    assert state.abs().max().item() == pytest.approx((2 * BASE) ** -0.5 / GROWTH, rel=0.01)
    whole = starting_value(Uniform((2 * BASE) ** -0.5), weight.shape, seed=1, name="x")
    torch.testing.assert_close(state, whole[8:] / GROWTH)


def test_scale_of_attention_follows_growing_heads() -> None:
    arch = architecture(model())
    growing, fixed, *_ = (spec for spec in arch.specs if isinstance(spec, AttentionSpec))
    assert growing.scale == 8**0.5 / 32  # heads have 8 channels in the base model, and 32 in this model
    assert fixed.scale is None


def test_tied_heads_divide_the_logits() -> None:
    assert architecture(model()).logits_scaling == 1
    tied = architecture(model(tie_embeddings=True, logits_scaling=3.0))
    assert tied.logits_scaling == 3 * GROWTH
    assert tied.multipliers["logits_scaling"] == 3 * GROWTH


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("start", Start)
def test_model_of_the_base_width_does_not_change(tied: bool, start: Start) -> None:
    plain = architecture(model(base=None, tie_embeddings=tied, init=start))
    same = architecture(model(base=WIDTH, tie_embeddings=tied, init=start))
    assert same.table == plain.table
    assert same.specs == plain.specs
    assert same.multipliers == plain.multipliers


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"kind": "gla", "heads": 4}, "kind", "unsupported"),
        ({"kind": "kda", "heads": 4}, "kind", "unsupported"),
        ({"kind": "mamba", "sparse": {"keys": 8}}, "sparse", "unsupported"),
        ({"kind": "attention", "heads": 4, "scale": 0.1}, "scale", "conflict"),
        ({"kind": "attention", "heads": 6, "head_dim": 16}, "heads", "not-divisible"),
        ({"kind": "attention", "heads": 8, "kv_heads": 2, "head_dim": 16}, "kv_heads", "not-divisible"),
        ({"kind": "gated_deltanet", "heads": 2}, "heads", "not-divisible"),
        ({"kind": "mamba2", "head_dim": 128}, "head_dim", "not-divisible"),
    ],
)
def test_what_does_not_transfer_is_refused(options: dict[str, Any], key: str, code: str) -> None:
    config = model(pattern="A", layers={"A": options})
    architecture(replace(config, mup=MupConfig()))
    with pytest.raises(ConfigError) as refused:
        architecture(config)
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [(f"model.layers.A.{key}", code)]


def test_heads_of_shared_attention_must_have_a_fixed_size() -> None:
    shared = {"kind": "shared_attention", "heads": 4, "hidden": 64, "rank": 2}
    config = model(pattern="s-", layers={"s": shared, "-": LAYERS["-"]})
    with pytest.raises(ConfigError) as refused:
        architecture(config)
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [
        ("model.layers.s.head_dim", "missing")
    ]
    architecture(replace(config, layers={**config.layers, "s": {**shared, "head_dim": 64}}))


def test_scale_of_heads_with_a_fixed_size_is_kept() -> None:
    options = {"kind": "attention", "heads": 8, "head_dim": 16, "scale": 0.1}
    (spec,) = architecture(model(pattern="A", layers={"A": options})).specs
    assert isinstance(spec, AttentionSpec)
    assert spec.scale == 0.1


def test_muon_is_refused() -> None:
    config = small_run(model(), OptimConfig(name="muon"))
    assert [(problem.key, problem.code) for problem in check(RunPlan.of(config)) if "optim" in problem.key] == [
        ("optim.name", "conflict")
    ]
    assert not [problem for problem in check(RunPlan.of(small_run(model()))) if "optim" in problem.key]
