"""muP in the engine: each weight's own learning rate, its weight decay, and equal bits at the base width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridtron.architecture.mup import MupConfig
from hybridtron.config.choices import KeptFormat
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_config, small_run


def run_with(base_width: int | None, tied: bool = False, decay: float = 0.0) -> Config:
    model = replace(small_config("M-W-", tied), mup=MupConfig(base_width))
    return small_run(model, OptimConfig(weight_decay=decay))


def trained(config: Config, groups: Groups) -> dict[str, torch.Tensor]:
    engine = Engine(resolve(config)[0], groups)
    torch.manual_seed(0)
    for _ in range(3):
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
    return {name: weight.clone() for name, weight in engine.weights()}


@pytest.mark.parametrize("tied", [False, True])
def test_training_at_the_base_width_has_the_same_bits(alone: Groups, tied: bool) -> None:
    expected = trained(run_with(None, tied, 0.1), alone)
    same = trained(run_with(32, tied, 0.1), alone)
    assert all(torch.equal(same[name], weight) for name, weight in expected.items())
    other = trained(run_with(16, tied, 0.1), alone)
    assert not all(torch.equal(other[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("moments", KeptFormat)
def test_step_multiplies_each_rate_by_the_weights_factor(alone: Groups, moments: KeptFormat) -> None:
    """With equal gradients, AdamW's first step moves every entry by the learning rate."""
    config = run_with(16)
    config = replace(config, precision=replace(config.precision, moments=moments))
    engine = Engine(resolve(config)[0], alone)
    before = {name: weight.clone() for name, weight in engine.weights()}
    for shard in engine.optimizer.shards.values():
        shard.weight.main_grad.fill_(1e-3)
    engine.optimizer.step(lr=0.1)
    table = engine.phase.table
    factors = set()
    for name, weight in engine.weights():
        factor = table[name].lr_factor
        factors.add(factor)
        torch.testing.assert_close(weight, before[name] - 0.1 * factor, rtol=0, atol=1e-4, msg=name)
    assert factors == {0.5, 1.0}


def test_every_weight_decays_by_the_same_factor(alone: Groups) -> None:
    engine = Engine(resolve(run_with(16, decay=0.5))[0], alone)
    before = {name: weight.clone() for name, weight in engine.weights()}
    for shard in engine.optimizer.shards.values():
        shard.weight.main_grad.fill_(0.0)
    engine.optimizer.step(lr=0.1)
    for name, weight in engine.weights():
        kept = 1 - 0.1 * 0.5 * engine.phase.table[name].decay
        torch.testing.assert_close(weight, before[name] * kept, msg=name)
