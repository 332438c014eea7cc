"""Muon under layouts and settings that `test_muon_layouts.py` leaves out: the same steps as a single process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.config.choices import KeptFormat, Precision
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.engine import update_rules
from hybridtron.engine.engine import Engine
from hybridtron.engine.update_rules import RuleOptimizer
from hybridtron.optimizers.muon import MuonOptions, Orthogonalization
from hybridtron.parallel.matrix_owners import exchanges
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.cases import Layout, small_model
from tests.distributed import run_distributed
from tests.engine.test_muon_layouts import (
    BY_HEAD,
    OPTIM,
    TOLERANCE,
    configured,
    largest_difference,
    stepped_from_gradients,
    take_steps,
    trained,
)
from tests.slow import slow_except

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
STEPS = 4
BF16 = replace(OPTIM, muon=MuonOptions())
SHARED = "SsGsS"  # two sub-layers with the same weights, in different pipeline stages
HEADLESS = ["embedding.weight", "*norm*", "layers.2.*", "layers.3.*"]  # no matrix in the first of two stages
ONE_MATRIX = [f"layers.0.mixer.{name}" for name in ("A_log", "conv_weight", "dt_proj.weight")]


def serial(config: Config) -> Config:
    return replace(config, parallel=ParallelConfig(distributed_optimizer=False))


def training_only(config: Config, train: list[str]) -> Config:
    return replace(config, phases=[replace(config.phases[0], train=train)])


def with_pattern(config: Config, pattern: str) -> Config:
    return replace(config, model=small_model(pattern, tied=True, heads={"kv_heads": 2}))


def with_moments(config: Config) -> Config:
    return replace(config, precision=replace(config.precision, moments=KeptFormat.bf16))


def with_bf16_weights(config: Config) -> Config:
    return replace(config, precision=replace(config.precision, name=Precision.bf16))


def worst_against_one_process(config: Config, world_size: int, steps: int = STEPS) -> float:
    several, *_ = run_distributed(trained, world_size, config, steps)
    (alone,) = run_distributed(trained, 1, serial(config), steps)
    assert any(not torch.equal(alone[name], start) for name, start in started(config).items())
    return largest_difference(several, alone).difference


def started(config: Config) -> dict[str, Tensor]:
    (weights,) = run_distributed(trained, 1, serial(config), 0)
    return weights


@pytest.mark.parametrize(
    "layout",
    slow_except(
        [Layout(pipeline=2, virtual=2), Layout(context=2, tensor=2, sequence=True), Layout(tensor=2, pipeline=2)]
    ),
    ids=str,
)
def test_more_layouts_equal_one_process(layout: Layout) -> None:
    assert worst_against_one_process(configured(layout), layout.world_size) < TOLERANCE


@pytest.mark.parametrize(
    "layout",
    slow_except([Layout(tensor=2), Layout(tensor=4), Layout(tensor=2, data=2), Layout(pipeline=2)], Layout(tensor=2)),
    ids=str,
)
def test_heads_equal_those_of_one_process(layout: Layout) -> None:
    """With four tensor-parallel ranks, every rank holds all heads of k and v."""
    assert worst_against_one_process(configured(layout, BY_HEAD), layout.world_size) < TOLERANCE


@pytest.mark.parametrize(
    "layout",
    slow_except(
        [Layout(pipeline=2), Layout(tensor=2), Layout(data=2), Layout(pipeline=2, tensor=2, sequence=True)],
        Layout(pipeline=2),
    ),
    ids=str,
)
def test_weights_that_several_layers_share_equal_those_of_one_process(layout: Layout) -> None:
    config = with_pattern(configured(layout), SHARED)
    assert worst_against_one_process(config, layout.world_size) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "train"),
    slow_except(
        [
            (Layout(pipeline=2), HEADLESS),
            (Layout(pipeline=2, data=2), HEADLESS),
            (Layout(data=4), ONE_MATRIX),
            (Layout(tensor=2), ["layers.0.*", "layers.2.mixer.kv.weight"]),
            (Layout(pipeline=2), ["layers.0.mixer.in_proj.weight"]),
        ],
        (Layout(data=4), ONE_MATRIX),
    ),
    ids=str,
)
def test_frozen_parts_equal_those_of_one_process(layout: Layout, train: list[str]) -> None:
    config = training_only(configured(layout), train)
    assert worst_against_one_process(config, layout.world_size) < TOLERANCE


@pytest.mark.slow
def test_a_rank_may_hold_no_entry_of_a_matrix() -> None:
    config = training_only(configured(Layout(data=4)), ONE_MATRIX)
    counts = run_distributed(entries_of_matrices, 4, config)
    assert 0 in counts
    assert sum(counts) > 0


def entries_of_matrices(seat: Seat, config: Config) -> int:
    with seat.groups(config.parallel) as groups:
        optimizer = Engine(resolve(config)[0], groups).optimizer
        return sum(
            shard.stop - shard.start
            for name, shard in optimizer.shards.items()
            if shard.master is not None and optimizer.table[name].is_mixer_projection
        )


@pytest.mark.parametrize("layout", slow_except([Layout(tensor=2), Layout(data=2), Layout(pipeline=2)]), ids=str)
def test_moments_in_bf16_equal_those_of_one_process(layout: Layout) -> None:
    config = with_moments(configured(layout))
    assert worst_against_one_process(config, layout.world_size) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "distributed"),
    slow_except(
        [
            (Layout(tensor=2, data=2), True),
            (Layout(tensor=2), True),
            (Layout(data=3), True),
            (Layout(pipeline=2, data=2), True),
            (Layout(tensor=2, data=2), False),
        ],
        (Layout(tensor=2, data=2), True),
    ),
    ids=str,
)
def test_equal_gradients_give_equal_bits_in_bf16(layout: Layout, distributed: bool) -> None:
    config = with_moments(with_bf16_weights(configured(layout, BF16, distributed=distributed)))
    several, *_ = run_distributed(stepped_from_gradients, layout.world_size, config, 3)
    (alone,) = run_distributed(stepped_from_gradients, 1, serial(config), 3)
    assert [name for name, weight in alone.items() if not torch.equal(several[name], weight)] == []


def trained_in_rounds(seat: Seat, config: Config, steps: int, limit: int) -> tuple[int, dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch, seat.groups(config.parallel) as groups:
        patch.setattr(update_rules, "exchanges", partial(exchanges, entries_of_rank=limit))
        engine = Engine(resolve(config)[0], groups)
        (optimizer,) = (part.optimizer for part in engine.optimizer.megatron.chained_optimizers)
        assert isinstance(optimizer, RuleOptimizer)
        take_steps(engine, steps)
        return len(optimizer.exchanges), {name: weight.clone() for name, weight in engine.weights()}


@pytest.mark.parametrize(
    "layout",
    slow_except([Layout(tensor=2, data=2), Layout(data=2), Layout(tensor=2, pipeline=2)], Layout(data=2)),
    ids=str,
)
def test_several_rounds_on_several_processes_change_no_bits(layout: Layout) -> None:
    config = configured(layout, BF16)
    results = run_distributed(trained_in_rounds, layout.world_size, config, STEPS, 500)
    assert all(count > 2 for count, _ in results)
    whole, *_ = run_distributed(trained, layout.world_size, config, STEPS)
    assert [name for name, weight in results[0][1].items() if not torch.equal(weight, whole[name])] == []


def order_of_calls(seat: Seat, config: Config, limit: int) -> tuple[int, list[str]]:
    """Return the number of rounds, and the calls of a step: transfers that start and end, iterations, other weights."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch, seat.groups(config.parallel) as groups:
        patch.setattr(update_rules, "exchanges", partial(exchanges, entries_of_rank=limit))
        engine = Engine(resolve(config)[0], groups)
        (optimizer,) = (part.optimizer for part in engine.optimizer.megatron.chained_optimizers)
        assert isinstance(optimizer, RuleOptimizer)
        start = dist.all_to_all_single
        direction = Orthogonalization.direction
        others = RuleOptimizer._update_others

        def started(*arguments: Any, **named: Any) -> Handle:
            number = sum(call.startswith("start") for call in calls)
            calls.append(f"start {number}")
            return Handle(number, start(*arguments, **named), calls)

        def iterated(self: Orthogonalization, matrix: Tensor) -> Tensor:
            if calls[-1] != "iterate":
                calls.append("iterate")
            return direction(self, matrix)

        def updated(self: RuleOptimizer, *arguments: Any) -> None:
            calls.append("others")
            others(self, *arguments)

        patch.setattr(dist, "all_to_all_single", started)
        patch.setattr(Orthogonalization, "direction", iterated)
        patch.setattr(RuleOptimizer, "_update_others", updated)
        take_steps(engine, 1)
        return len(optimizer.exchanges), calls


@dataclass
class Handle:
    """Handle of a transfer, whose wait is listed."""

    number: int
    inner: Any
    calls: list[str]

    def wait(self) -> None:
        self.calls.append(f"end {self.number}")
        self.inner.wait()


def test_transfers_overlap_with_the_iteration_of_other_matrices() -> None:
    """A round's directions arrive after the next round's iteration, and its entries leave before the last round's.

    Transfers 0, 1 and 3 have the entries of the three rounds, and transfers 2, 4 and 5 their directions. A rank without
    a matrix in a round iterates none.
    """
    expected = [
        *("start 0", "start 1", "end 0", "iterate", "start 2"),
        *("start 3", "end 1", "iterate", "start 4", "end 2"),
        *("end 3", "iterate", "start 5", "end 4"),
        *("others", "end 5"),
    ]
    results = run_distributed(order_of_calls, 2, configured(Layout(data=2), BF16), 5000)
    assert [rounds for rounds, _ in results] == [3, 3]
    assert expected in [calls for _, calls in results]
    transfers = [call for call in expected if call != "iterate"]
    assert all([call for call in calls if call != "iterate"] == transfers for _, calls in results)
