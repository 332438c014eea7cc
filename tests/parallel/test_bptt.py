"""TBTT through the chunks of a step in layouts: losses and gradients of one process. And lanes that start again."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, ParallelConfig, Recompute, StateMode, StatesConfig
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from tests.distributed import run_distributed
from tests.parallel.test_states import LANES, LAYOUTS, LENGTH, LR, ROWS, VOCABULARY, config_of

STEPS = 3
CHUNKS = 2
ALONE = ParallelConfig()


def unbounded(parallel: ParallelConfig) -> Config:
    """Return a configuration with span attention over all tokens, so that cuts between rows have no effect."""
    config = config_of(StateMode.tbtt, parallel)
    span = {**config.model.layers["X"], "remember": STEPS * CHUNKS * LENGTH}
    config.model = replace(config.model, layers={**config.model.layers, "X": span})
    return config


def through(parallel: ParallelConfig) -> Config:
    config = unbounded(parallel)
    config.states = StatesConfig(mode=StateMode.tbtt, chunks=CHUNKS, through_time=True)
    config.phases = [replace(config.phases[0], global_batch=LANES * CHUNKS)]
    return config


def whole_rows() -> Config:
    """Return the configuration with rows of all chunks, which need no carried states within a step."""
    config = unbounded(ALONE)
    config.phases = [replace(config.phases[0], seq_len=LENGTH * CHUNKS)]
    return config


def step_of(step: int) -> Batch:
    """Random rows of all chunks, with borders within chunks, where the second one begins, and none."""
    generator = torch.Generator().manual_seed(step)
    length = LENGTH * CHUNKS
    tokens_BT = torch.randint(VOCABULARY, (LANES, length + 1), generator=generator)
    mask_BL = torch.rand(LANES, length, generator=generator) < torch.linspace(0.3, 1, LANES)[:, None]
    border_B = torch.tensor([LENGTH, LENGTH + 3, 5, length] * (LANES // 4))
    place_L = torch.arange(length)
    documents_BL = (place_L >= border_B[:, None]).int()
    positions_BL = torch.where(documents_BL > 0, place_L - border_B[:, None], place_L)
    continues_B = (torch.arange(LANES) % 3 != step % 3) & (step > 0)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo(positions_BL, documents_BL), continues_B)


def lanes_of(data_rank: int, data_size: int) -> range:
    count = LANES // data_size
    return range(data_rank * count, (data_rank + 1) * count)


def trained(seat: Seat, config: Config) -> tuple[list[float], dict[str, Tensor], tuple[int, int]]:
    """The loss of each step, the last gradients on the first rank, and bytes carried: of tensors, and as planned."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        losses = []
        lanes = lanes_of(groups.data.rank, groups.data.size)
        engine.start_phase(engine.phase, lanes)
        for step in range(STEPS):
            batch = step_of(step).map(lambda tensor: tensor[lanes.start : lanes.stop])
            losses.append(engine.forward_backward(batch.split(ROWS), step).mean.item())
            gradients = {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}
            engine.step(LR)
        assert engine.carrier is not None
        held = 2 * sum(tensor.nbytes for parts in engine.carrier.lane_states.values() for tensor in parts.values())
        planned = plan(resolve(config)[0], groups.world_size).ranks[groups.pipeline.rank].memory.states
        return losses, gradients, (held, planned)


@functools.cache
def of_whole_rows() -> tuple[list[float], dict[str, Tensor]]:
    ((losses, gradients, _),) = run_distributed(trained, 1, whole_rows())
    return losses, gradients


CASES = {
    "alone": (ALONE, 1),
    **{name: (replace(parallel, recompute=Recompute.layer), ranks) for name, (parallel, ranks) in LAYOUTS.items()},
    "tp2-pp2-kept": LAYOUTS["tp2-pp2"],
    "pp2-virtual2-kept": LAYOUTS["pp2-virtual2"],
}
FAST = ("alone", "pp2-virtual2")


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_chunks_through_time_in_layouts_equal_whole_rows(layout: str) -> None:
    """States of the step before enter as well; each rank's carried bytes agree with the plan."""
    parallel, ranks = CASES[layout]
    expected, whole = of_whole_rows()
    for rank, (losses, gradients, (held, planned)) in enumerate(run_distributed(trained, ranks, through(parallel))):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert held == planned
        if rank == 0:
            assert gradients.keys() == whole.keys()
            for name, gradient in whole.items():
                assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def restarted(seat: Seat, config: Config, lane: int) -> tuple[list[int | None], dict[int, Any]]:
    """A lane's state in the last stage's last layer is broken: how often lanes restarted, and which hold states."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        counts = []
        lanes = lanes_of(groups.data.rank, groups.data.size)
        engine.start_phase(engine.phase, lanes)
        carrier = engine.carrier
        assert carrier is not None
        for step in range(2):
            batch = step_of(step).chunks(CHUNKS)[0].map(lambda tensor: tensor[lanes.start : lanes.stop])
            engine.forward_backward(batch.split(ROWS), step)
            if step == 0 and groups.pipeline.rank == groups.pipeline.size - 1 and lane in lanes:
                number, row = divmod(lane - lanes.start, ROWS)
                last = len(config.model.pattern) - 1
                carrier._final_states[0, number][last]["ssm"][row, 0, 0] = torch.nan
            engine.step(0.0)
            counts.append(engine.restarted_lanes)
            if step == 0:
                full = {
                    layer: [lanes[k] for k in range(len(lanes)) if any(t[k].any() for t in parts.values())]
                    for layer, parts in carrier.lane_states.items()
                }
                empty = {
                    layer: [lanes[k] for k in range(len(lanes)) if not any(t[k].any() for t in parts.values())]
                    for layer, parts in carrier.lane_states.items()
                }
        return counts, {layer: (full[layer], empty[layer]) for layer in full}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "lane"),
    [("pp2", 2), pytest.param("dp2", 5, marks=pytest.mark.slow), pytest.param("tp2", 7, marks=pytest.mark.slow)],
)
def test_broken_lane_restarts_on_every_rank(layout: str, lane: int) -> None:
    parallel, ranks = LAYOUTS[layout]
    results = run_distributed(restarted, ranks, config_of(StateMode.tbtt, parallel), lane)
    assert [counts for counts, _ in results] == [[1, 1]] * ranks
    layers: dict[int, tuple[set[int], set[int]]] = {}
    for _, of_rank in results:
        for layer, (full, empty) in of_rank.items():
            known = layers.setdefault(layer, (set(), set()))
            known[0].update(full)
            known[1].update(empty)
    assert layers == dict.fromkeys([0, 2, 3, 4, 5], (set(range(LANES)) - {lane}, {lane}))
