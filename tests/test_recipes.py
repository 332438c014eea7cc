"""Every recipe builds a model, and a run of it takes a step."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.inits import Normal
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Precision, PrecisionConfig
from hybridtron.engine.engine import Engine
from hybridtron.model.init import starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch
from tests.recipes import RECIPES


@pytest.fixture(params=RECIPES)
def config(request: pytest.FixtureRequest) -> Config:
    return load([f"recipe={request.param}"])


def test_every_recipe_builds_on_the_meta_device_with_the_counted_parameters(config: Config) -> None:
    assert check(RunPlan.of(config)) == []
    with torch.device("meta"):
        model = LanguageModel(architecture(config.model))
    built = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert built == {name: parameter.shape for name, parameter in architecture(config.model).table.items()}


def test_every_recipe_takes_a_step_with_its_widths_shrunk(config: Config, alone: Groups) -> None:
    """The model has only one layer of each kind."""
    model = shrunk(one_of_each(config.model))
    small = dataclasses.replace(config, model=model, precision=PrecisionConfig(Precision.fp32))
    phase = resolve(small)[0]
    engine = Engine(resolve(small)[0], alone, partial(start_of, architecture(phase.model).table))
    before = {name: weight.clone() for name, weight in engine.weights()}
    loss = engine.forward_backward([random_batch(2, 16, vocab=64) for _ in range(2)])
    assert loss.mean.item() == pytest.approx(math.log(64), rel=0.2)
    grad_norm, accepted = engine.optimizer.step(1e-3)
    assert accepted
    assert 0 < grad_norm < 10_000  # twenty norms of heads in gla_360m enlarge what queries hardly read
    changed = {name: not torch.equal(weight, before[name]) for name, weight in engine.weights()}
    assert changed == {name: phase.learns(name) for name in before}


def one_of_each(model: ModelConfig) -> ModelConfig:
    """Return the model with each letter's first layer only, and the next layer if it reads that one."""
    arch = architecture(model)
    units = ("".join(arch.letters[index] for index in unit) for unit in arch.inseparable)
    return dataclasses.replace(model, pattern="".join(dict.fromkeys(units)))


def start_of(table: dict[str, Parameter], name: str) -> Tensor:
    """Return a weight's initial value. Random values replace zeros, through which no gradient would flow."""
    start = starting_value(table[name].init, table[name].shape, 0, name)
    if start.any():
        return start
    return starting_value(Normal(0.02), table[name].shape, 0, name)


def shrunk(model: ModelConfig) -> ModelConfig:
    """Return the model with the same pattern, heads and options, but 8 channels per head and a width of 8 per query
    head, or of 10 if 8 would not give keys of the delta rule a whole number of channels.
    """
    heads = max((options.get("heads", 1) for options in model.layers.values()), default=1)
    width = 8 * heads
    if any(width * options.get("expand_k", 1) % 1 for options in model.layers.values()):
        width = 10 * heads
    small = {"hidden": 24, "window": 8, "head_dim": 8, "rotary_dim": 4, "chunk": 8, "block": 2}
    layers = {
        letter: options | {name: small[name] for name in small.keys() & options.keys() if options[name] is not None}
        for letter, options in model.layers.items()
    }
    return dataclasses.replace(model, width=width, vocab_size=64, layers=layers)
