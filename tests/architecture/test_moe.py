"""Options of experts: counts by hand, and options that do not fit together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.model.init import starting_value
from hybridtron.planning.count import count
from hybridtron.problems import ConfigError

SIZES = ModelSizes(width=32, num_sublayers=4)
GOOD: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 16}


def model_of(**options: Any) -> ModelConfig:
    return ModelConfig(32, 64, "E-", {"E": {"kind": "moe", **GOOD, **options}, "-": {"kind": "swiglu", "hidden": 64}})


def test_counts_are_those_computed_by_hand() -> None:
    """FLOPs of a token: the router, two experts of three matrices, and the shared expert with its gate."""
    spec = MoESpec(**GOOD, shared=24, shared_gate=True, balance="bias")
    router = 8 * 32
    expert = 3 * 16 * 32
    shared = 3 * 24 * 32 + 32
    assert sum(weight.size for weight in spec.parameters(SIZES).values()) == router + 8 * expert + shared + 8
    assert sum(spec.flops(SIZES, 128).values()) == 2 * (router + 2 * expert + shared)


def test_experts_of_a_latent_width_read_and_write_its_channels() -> None:
    spec = MoESpec(**GOOD, shared=24, latent=8)
    counted = 8 * 32 + 8 * 3 * 16 * 8 + 2 * 8 * 32 + 3 * 24 * 32
    assert sum(weight.size for weight in spec.parameters(SIZES).values()) == counted
    assert sum(spec.flops(SIZES, 128).values()) == 2 * (8 * 32 + 2 * 3 * 16 * 8 + 2 * 8 * 32 + 3 * 24 * 32)


def test_active_parameters_leave_out_the_experts_of_other_tokens() -> None:
    counted = count(architecture(model_of()), 128)
    assert counted.parameters - counted.active == 6 * 3 * 16 * 32
    dense = count(architecture(ModelConfig(32, 64, "-", {"-": {"kind": "swiglu", "hidden": 64}})), 128)
    assert dense.active == dense.parameters


def test_squared_relu_has_two_matrices() -> None:
    spec = MoESpec(**GOOD, activation="squared_relu")
    assert spec.parameters(SIZES)["gate_up"].shape == (8, 16, 32)
    assert spec.parameters(SIZES)["gate_up"].parts == ()


def test_values_of_an_expert_do_not_depend_on_the_number_of_experts() -> None:
    few, many = (MoESpec(**{**GOOD, "experts": experts}).parameters(SIZES)["down"] for experts in (4, 8))
    of_few, of_many = (starting_value(weight.init, weight.shape, 1, "down") for weight in (few, many))
    assert torch.equal(of_many[:4], of_few)
    assert not torch.equal(of_many[0], of_many[1])
    assert float(of_many.abs().max()) <= (16 * 4) ** -0.5


def test_lit_gpt_initialisation_reaches_experts() -> None:
    model = model_of()
    model.init = type(model.init)("lit_gpt")
    weight = architecture(model).table["layers.0.mixer.gate_up"]
    value = starting_value(weight.init, weight.shape, 1, "gate_up")
    assert float(value.std()) == pytest.approx(math.sqrt(2 / (5 * 32)), rel=0.05)


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"top_k": 9}, "top_k", "out-of-range"),
        ({"top_k": 0}, "top_k", "out-of-range"),
        ({"experts": 0}, "experts", "out-of-range"),
        ({"experts": 1, "top_k": 1, "normalise": False}, "experts", "out-of-range"),
        ({"top_k": 1}, "normalise", "no-effect"),
        ({"groups": 3}, "groups", "not-divisible"),
        ({"groups": 4, "group_limit": 5}, "group_limit", "out-of-range"),
        ({"groups": 8, "group_limit": 1}, "group_limit", "does-not-fit"),
        ({"groups": 4}, "groups", "no-effect"),
        ({"groups": 4, "group_limit": 4}, "group_limit", "no-effect"),
        ({"group_limit": 1}, "group_limit", "no-effect"),
        ({"shared_gate": True}, "shared_gate", "no-effect"),
        ({"balance": "bias", "coefficient": 0.1}, "coefficient", "no-effect"),
        ({"balance": "none", "speed": 0.1}, "speed", "no-effect"),
        ({"balance": "both"}, "balance", "unknown-name"),
        ({"scores": "tanh"}, "scores", "unknown-name"),
        ({"latent": 0}, "latent", "out-of-range"),
        ({"latent": 32}, "latent", "out-of-range"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], key: str, code: str) -> None:
    with pytest.raises(ConfigError) as refused:
        architecture(model_of(**options))
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [(f"model.layers.E.{key}", code)]


@pytest.mark.parametrize("options", [{"top_k": 1, "normalise": False}, {"experts": 2}, {"groups": 4, "group_limit": 2}])
def test_options_at_the_limit_are_allowed(options: dict[str, Any]) -> None:
    assert architecture(model_of(**options)).table


@pytest.mark.parametrize(
    ("settings", "key", "code"),
    [
        (["run.compile=true"], "run.compile", "unsupported"),
        (["parallel.tensor=3"], "parallel.tensor", "not-divisible"),
    ],
)
def test_settings_that_experts_lack_are_refused(settings: list[str], key: str, code: str) -> None:
    problems = check(RunPlan.of(load(["recipe=moe_laptop", *settings])))
    assert (key, code) in [(problem.key, problem.code) for problem in problems]


def test_layout_that_divides_experts_but_not_the_shared_expert_is_refused() -> None:
    spec = MoESpec(**GOOD, shared=15)
    assert [problem.key for problem in spec.layout_problems(SIZES, 2)] == ["shared"]
