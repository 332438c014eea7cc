"""Muon with experts: each expert's gate, up and down is a matrix of its own, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.optimizers.muon import Muon, MuonOptions, Orthogonalization
from hybridtron.parallel import matrix_owners
from hybridtron.parallel.matrix_owners import DividedWeight, pieces_of
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.cases import Layout, small_model
from tests.distributed import run_distributed
from tests.engine.test_muon_layouts import (
    OPTIM,
    TOLERANCE,
    allocated_bytes,
    by_hand,
    configured,
    divided,
    largest_difference,
    sent_counts,
    stepped_from_gradients,
    trained,
    trained_with_stop,
)
from tests.slow import slow_except

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
GATED = "Me"  # experts with a gate, balanced by a loss
BOTH = "MeWx"  # and experts without, whose correction moves
IN_BATCHES = 600  # entries of a batch: gates of 2 of 8 experts, or of 6 of 8 that are latent
STEPS = 3
FULL_EXPERTS = Layout(tensor=2, sequence=True, expert=2, expert_tensor=1)


def with_experts(layout: Layout, pattern: str = BOTH, optim: OptimConfig = OPTIM, distributed: bool = True) -> Config:
    model = small_model(pattern, tied=True, heads={"kv_heads": 2})
    return replace(configured(layout, optim, distributed), model=model)


@contextmanager
def batches(entries: int, mistake: str = "") -> Iterator[None]:
    """Limit the batches of experts, and plant a mistake, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_owners, "ENTRIES_TOGETHER", entries)
        whole = Orthogonalization.direction

        def as_one(self: Orthogonalization, matrix: Tensor) -> Tensor:
            return whole(self, matrix.reshape(-1, matrix.shape[-1])).reshape(matrix.shape)

        if mistake == "experts as one matrix":
            patch.setattr(Orthogonalization, "direction", as_one)
        yield


def trained_in_batches(seat: Seat, config: Config, steps: int, entries: int, mistake: str = "") -> dict[str, Tensor]:
    with batches(entries, mistake):
        return trained(seat, config, steps)


def stepped_in_batches(seat: Seat, config: Config, steps: int, entries: int) -> dict[str, Tensor]:
    with batches(entries):
        return stepped_from_gradients(seat, config, steps)


def difference_to_formulas(mistake: str = "") -> float:
    config = with_experts(Layout(), GATED, distributed=False)
    (ours,) = run_distributed(trained_in_batches, 1, config, STEPS, IN_BATCHES, mistake)
    (by_formulas,) = run_distributed(by_hand, 1, config, STEPS)
    return largest_difference({name: weight.double() for name, weight in ours.items()}, by_formulas).difference


def test_steps_equal_the_formulas_in_float64() -> None:
    assert difference_to_formulas() < 2e-5


def test_experts_that_are_iterated_as_one_matrix_are_noticed() -> None:
    assert difference_to_formulas("experts as one matrix") > 5 * TOLERANCE


@pytest.mark.parametrize(
    ("layout", "distributed"),
    slow_except(
        [
            (Layout(tensor=2), True),
            (Layout(data=2), True),
            (Layout(tensor=2, data=2), True),
            (Layout(tensor=2, sequence=True), False),
            (Layout(data=2), False),
            (Layout(pipeline=2), True),
            (Layout(context=2), True),
            (Layout(data=2, expert=2), True),
            (Layout(data=4, expert=2), True),
            (Layout(data=4, expert=4), True),
            (Layout(tensor=2, data=2, expert=2), True),
            (Layout(data=2, expert=2), False),
            (FULL_EXPERTS, True),
            (Layout(pipeline=2, data=2, expert=2), True),
            (Layout(context=2, expert=2), True),
        ],
        (Layout(tensor=2), True),
        (Layout(data=2), True),
        (FULL_EXPERTS, True),
    ),
    ids=str,
)
def test_steps_equal_those_of_one_process(layout: Layout, distributed: bool) -> None:
    config = with_experts(layout, distributed=distributed)
    several, *_ = run_distributed(trained_in_batches, layout.world_size, config, STEPS, IN_BATCHES)
    (serial,) = run_distributed(trained_in_batches, 1, with_experts(Layout(), distributed=False), STEPS, IN_BATCHES)
    worst = largest_difference(several, serial)
    assert worst.difference < TOLERANCE, worst


@pytest.mark.parametrize(
    ("layout", "distributed"),
    slow_except(
        [
            (Layout(data=3), True),
            (Layout(tensor=2, data=2), True),
            (Layout(data=2), False),
            (Layout(data=4, expert=2), True),
            (Layout(tensor=2, data=2, expert=2), True),
            (Layout(data=2, expert=2), False),
            (FULL_EXPERTS, True),
        ],
        (Layout(data=3), True),
        (Layout(data=2, expert=2), False),
    ),
    ids=str,
)
def test_equal_gradients_give_equal_bits_on_any_number_of_ranks(layout: Layout, distributed: bool) -> None:
    optim = replace(OPTIM, muon=MuonOptions())
    config = with_experts(layout, optim=optim, distributed=distributed)
    several, *_ = run_distributed(stepped_in_batches, layout.world_size, config, STEPS, IN_BATCHES)
    alone = with_experts(Layout(), optim=optim, distributed=False)
    (serial,) = run_distributed(stepped_in_batches, 1, alone, STEPS, IN_BATCHES)
    assert [name for name, weight in serial.items() if not torch.equal(several[name], weight)] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2, expert=2), FULL_EXPERTS], ids=str)
def test_a_resumed_run_has_the_same_bits_and_continues_under_another_layout(layout: Layout, tmp_path: Path) -> None:
    config = with_experts(layout, GATED, replace(OPTIM, muon=MuonOptions()))
    whole, *_ = run_distributed(trained_with_stop, 2, config, 4, tmp_path / "run")
    again, *_ = run_distributed(trained_with_stop, 2, config, 4, tmp_path / "run")
    assert [name for name, weight in whole.items() if not torch.equal(again[name], weight)] == []
    data = with_experts(Layout(data=2), GATED, config.optim)
    other, *_ = run_distributed(trained_with_stop, 2, data, 4, tmp_path / "run")
    worst = largest_difference(other, whole)
    assert worst.difference < 5e-3, worst


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("expert_tensor", "expert", "copies"), [(1, 1, 1), (2, 1, 3), (4, 1, 2), (1, 4, 2), (2, 2, 2)])
def test_every_entry_is_sent_once_and_returned_to_all_holders(
    expert_tensor: int, expert: int, copies: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_owners, "ENTRIES_TOGETHER", IN_BATCHES)
    mesh = Mesh({"expert_tensor": RankGroup(expert_tensor), "expert": RankGroup(expert)}, RankGroup(copies))
    for weight in experts_of(mesh, everywhere):
        assert len(weight.matrices) >= 2
        assert all((count == 1).all() for count in sent_counts(weight)), weight.name
        for rank in range(expert_tensor * expert * copies):
            returned = torch.zeros(len(weight.ranges[weight.mesh.at(rank).copies.rank]), dtype=torch.int64)
            for piece in pieces_of(weight, rank):
                piece.view(returned).add_(1)
            assert (returned == 1).all()


def experts_of(mesh: Mesh, everywhere: bool) -> list[DividedWeight]:
    table = architecture(small_model("ex", tied=True, heads={})).table
    return [divided(name, weight, mesh, everywhere) for name, weight in table.items() if len(weight.shape) == 3]


def test_batches_have_the_experts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "ENTRIES_TOGETHER", 1100)  # 4 of 8 experts, whose gate has 8 x 32 entries
    gate_up = experts_of(Mesh(), everywhere=False)[0]
    shapes = {".".join(name.split(".")[-2:]): shape for name, shape in gate_up.matrices.items()}
    assert shapes == {"gate.0": (4, 8, 32), "gate.4": (4, 8, 32), "up.0": (4, 8, 32), "up.4": (4, 8, 32)}


def test_routers_have_adamws_state_and_experts_have_a_momentum() -> None:
    table = architecture(small_model("e", tied=True, heads={})).table
    parts = {name.split(".")[-1]: set(Muon().parts(name, weight)) for name, weight in table.items()}
    assert parts["router"] == parts["shared_gate"] == {"exp_avg", "exp_avg_sq"}
    assert parts["gate_up"] == parts["down"] == {"exp_avg"}


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, expert=2)], ids=str)
def test_planned_optimizer_bytes_equal_the_allocated_bytes(layout: Layout) -> None:
    config = with_experts(layout, distributed=False)
    allocated, *_ = run_distributed(allocated_bytes, layout.world_size, config)
    assert plan(resolve(config)[0], layout.world_size).ranks[0].memory.optimizer == allocated


def test_a_recipe_with_experts_accepts_muon() -> None:
    problems = check(RunPlan.of(load(["recipe=moe_laptop", "optim.name=muon"])))
    assert [problem for problem in problems if problem.key == "optim.name"] == []
