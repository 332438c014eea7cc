"""Muon with `blocked`: each tensor-parallel rank orthogonalizes its own cut of every matrix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import Cut, Parameter, linear
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.config.update_rule import update_rule_warnings
from hybridtron.parallel.matrix_owners import DividedWeight
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.cases import Layout, small_model
from hybridtron.train.start import changed_cuts
from tests.distributed import run_distributed
from tests.engine import test_muon_layouts as layouts
from tests.engine.test_muon_layouts import (
    OPTIM,
    TOLERANCE,
    by_hand,
    configured,
    largest_difference,
    stepped_from_gradients,
    trained,
)
from tests.slow import slow_except

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
BLOCKED = replace(OPTIM, muon=replace(OPTIM.muon, blocked=True))
STEPS = 3
EXPERTS = "Me"


def blocked(layout: Layout, pattern: str = layouts.PATTERN, distributed: bool = True) -> Config:
    model = small_model(pattern, tied=True, heads={"kv_heads": 2})
    return replace(configured(layout, BLOCKED, distributed), model=model)


def by_hand_in_two(seat: Seat, config: Config, steps: int) -> dict[str, Tensor]:
    """Take the steps on one process, with every matrix cut into the two that tensor-parallel ranks hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "hand_direction", direction_in_two)
        return by_hand(seat, config, steps)


whole_direction = layouts.hand_direction


def direction_in_two(
    name: str, weight: Parameter, gradient: np.ndarray, state: list[np.ndarray], step: int, optim: OptimConfig
) -> np.ndarray:
    by_expert = gradient.ndim == 3
    if not weight.is_mixer_projection and not by_expert:
        return whole_direction(name, weight, gradient, state, step, optim)
    mu = optim.muon.momentum
    state[0] = mu * state[0] + (1 - mu) * gradient
    update = mu * state[0] + (1 - mu) * gradient
    (cut,) = (cut for cut in weight.cuts if cut.over != "expert")
    first = gradient.ndim - 2  # the axis of rows
    ends = np.cumsum(weight.fused_sizes(first))[:-1]
    experts = []
    for expert in update.reshape(-1, *update.shape[-2:]):
        for part in np.split(expert, ends):
            halves = np.split(part, 2, cut.axis - first)
            experts.append(np.concatenate([layouts.hand_orthogonal(half, optim) for half in halves], cut.axis - first))
    return np.concatenate(experts).reshape(update.shape)


@pytest.mark.parametrize(
    ("layout", "pattern", "distributed"),
    slow_except(
        [
            (Layout(tensor=2), layouts.PATTERN, True),
            (Layout(tensor=2, data=2), layouts.PATTERN, True),
            (Layout(tensor=2, data=2), layouts.PATTERN, False),
            (Layout(tensor=2), EXPERTS, True),
            (Layout(tensor=2, data=2, expert=2), EXPERTS, True),
            (Layout(tensor=2, pipeline=2), layouts.PATTERN, True),
        ],
        (Layout(tensor=2, data=2), layouts.PATTERN, True),
        (Layout(tensor=2), EXPERTS, True),
    ),
    ids=str,
)
def test_steps_equal_the_formulas_for_each_cut(layout: Layout, pattern: str, distributed: bool) -> None:
    several, *_ = run_distributed(trained, layout.world_size, blocked(layout, pattern, distributed), STEPS)
    (by_formulas,) = run_distributed(by_hand_in_two, 1, blocked(Layout(), pattern, distributed=False), STEPS)
    worst = largest_difference({name: weight.double() for name, weight in several.items()}, by_formulas)
    assert worst.difference < TOLERANCE, worst


def test_steps_differ_from_those_with_full_matrices() -> None:
    layout = Layout(tensor=2)
    several, *_ = run_distributed(trained, 2, blocked(layout), STEPS)
    (serial,) = run_distributed(trained, 1, configured(Layout(), distributed=False), STEPS)
    assert largest_difference(several, serial).difference > 5 * TOLERANCE


@pytest.mark.parametrize(
    ("layout", "distributed"),
    slow_except([(Layout(tensor=2, data=2), True), (Layout(tensor=2, data=2), False)]),
    ids=str,
)
def test_equal_gradients_give_equal_bits_on_any_number_of_data_ranks(layout: Layout, distributed: bool) -> None:
    several, *_ = run_distributed(stepped_from_gradients, 4, blocked(layout, distributed=distributed), STEPS)
    alone, *_ = run_distributed(stepped_from_gradients, 2, blocked(Layout(tensor=2), distributed=False), STEPS)
    assert [name for name, weight in alone.items() if not torch.equal(several[name], weight)] == []


def sizes_of_transfers(seat: Seat, config: Config) -> list[int]:
    """Return the number of ranks in each transfer of a step."""
    sizes: list[int] = []
    start = dist.all_to_all_single

    def started(*arguments: Any, **named: Any) -> Any:
        sizes.append(dist.get_world_size(named["group"]))
        return start(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", started)
        trained(seat, config, 1)
    return sizes


@pytest.mark.parametrize("layout", slow_except([Layout(tensor=2), Layout(tensor=2, data=2)], Layout(tensor=2)), ids=str)
def test_entries_are_exchanged_with_data_parallel_ranks_alone(layout: Layout) -> None:
    for sizes in run_distributed(sizes_of_transfers, layout.world_size, blocked(layout)):
        assert sizes == [layout.data] * len(sizes) if layout.data > 1 else sizes == []
    whole = configured(layout)
    for sizes in run_distributed(sizes_of_transfers, layout.world_size, whole):
        assert set(sizes) == {layout.world_size}


def test_shards_keep_their_parts_and_heads() -> None:
    parameter = linear(24, 10, parts=(("z", 8), ("x", 12), ("dt", 4)), heads=(4, 2, 1))
    mesh = Mesh({"tensor": RankGroup(2, 1)}, RankGroup(3, 2))
    ranges = [range(40), range(40, 80), range(80, 120)]
    shard = DividedWeight("w", parameter, mesh, ranges, False, by_head=True).in_shards()
    assert shard.matrices == {"w.z": (2, 2, 10), "w.x": (6, 10), "w.dt": (2, 10)}
    assert (shard.mesh, shard.ranges) == (Mesh({}, mesh.copies), ranges)
    output = replace(parameter, parts=(), heads=(4,), cuts=(Cut(1),))
    assert DividedWeight("w", output, mesh, ranges, False, by_head=True).in_shards().matrices == {"w": (4, 6, 5)}


def test_a_warning_says_that_one_rank_cuts_nothing() -> None:
    (warning,) = update_rule_warnings(resolve(blocked(Layout())))
    assert "optim.muon.blocked=true changes nothing" in warning
    assert update_rule_warnings(resolve(blocked(Layout(tensor=2)))) == []
    assert update_rule_warnings(resolve(configured(Layout()))) == []


def test_other_cuts_at_a_resume_are_warned_of() -> None:
    def warning(before: int, now: int, blocked: str, key: str = "tensor", *others: str) -> str | None:
        settings = ["optim.name=muon", f"optim.muon.blocked={blocked}", *others]
        configs = [load(["recipe=moe_laptop", *settings, f"parallel.{key}={ranks}"]) for ranks in (before, now)]
        start: Any = SimpleNamespace(meta=SimpleNamespace(step=3), config=configs[0])
        return changed_cuts(start, RunPlan.of(configs[1]))

    assert "parallel.tensor is 2 but was 1 up to step 3" in (warning(1, 2, "true") or "")
    assert warning(2, 2, "true") is None
    assert warning(1, 2, "false") is None
    full = warning(2, 1, "true", "expert_tensor", "parallel.tensor=2", "parallel.sequence=true")
    assert "parallel.expert_tensor is 1 but was 2 up to step 3" in (full or "")
    assert warning(1, 2, "true", "expert") is None
