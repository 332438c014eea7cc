"""Carried states in every layout: the losses of one process, step by step, in every mode."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from hybridtron.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    Recompute,
    RunConfig,
    StateMode,
    StatesConfig,
)
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed

STEPS, LANES, ROWS, LENGTH, VOCABULARY = 20, 8, 2, 16, 32
LR = 1e-2
LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 8, "groups": 2},
    "W": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 8},
    "-": {"kind": "swiglu", "hidden": 48},
}
LAYOUTS = {
    "tp2": (ParallelConfig(tensor=2), 2),
    "tp2-sp": (ParallelConfig(tensor=2, sequence=True), 2),
    "pp2": (ParallelConfig(pipeline=2), 2),
    "pp2-virtual2": (ParallelConfig(pipeline=2, virtual_pipeline=2), 2),
    "dp2": (ParallelConfig(), 2),
    "tp2-pp2": (ParallelConfig(tensor=2, pipeline=2), 4),
}
MODES = [mode for mode in StateMode if mode is not StateMode.zero]


def config_of(mode: StateMode, parallel: ParallelConfig) -> Config:
    return Config(
        model=ModelConfig(width=32, vocab_size=VOCABULARY, pattern="M-SWM", layers=LAYERS),
        data=DataConfig(path="unused"),
        optim=OptimConfig(eps=1e-3),  # a coarse one, as rounding may turn the sign of a tiny gradient
        parallel=parallel,
        states=StatesConfig(mode=mode, sigma=0.5, dropout=0.3),
        run=RunConfig(name="test", dir="unused"),
        phases=[PhaseConfig(tokens="1M", seq_len=LENGTH, global_batch=LANES, micro_batch=ROWS, lr=LR)],
    )


def step_of(step: int) -> Batch:
    """What all lanes read in a step: masks of unequal weight, and borders here and there.

    A lane's text repeats a token of its own behind a first one that all share, and it is the first tokens that count:
    what they are followed by is known from the state alone.
    """
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.arange(1, LANES + 1)[:, None].repeat(1, LENGTH + 1)
    tokens_BT[:, 0] = 0
    mask_BL = torch.rand(LANES, LENGTH, generator=generator) < torch.linspace(0.1, 0.3, LANES)[:, None]
    mask_BL[:, 0] = True
    border_B = torch.randint(1, 2 * LENGTH, (LANES,), generator=generator)
    place_L = torch.arange(LENGTH)
    documents_BL = (place_L >= border_B[:, None]).int()
    positions_BL = torch.where(documents_BL > 0, place_L - border_B[:, None], place_L)
    continues_B = (torch.rand(LANES, generator=generator) < 0.8) & (step > 0)
    seq = SeqInfo(positions_BL, documents_BL)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, seq, continues_B)


def losses(seat: Seat, config: Config, swapped: bool = False, stopped: int | None = None) -> list[float]:
    """The loss of each step. `swapped` exchanges two lanes' states after each; `stopped` goes on with a new engine."""
    with seat.groups(config.parallel) as groups:
        engine, found = Engine(config, groups), []
        own = LANES // groups.data_size
        lanes = range(groups.data_rank * own, (groups.data_rank + 1) * own)
        engine.start_phase(0, lanes)
        for step in range(STEPS):
            if step == stopped:
                engine = resumed(engine, config, lanes)
            batch = step_of(step).map(lambda tensor: tensor[lanes.start : lanes.stop])
            found.append(engine.forward_backward(batch.split(ROWS), step).mean.item())
            engine.step(LR)
            if swapped and engine.carrier is not None:
                order = [1, 0, *range(2, own)]
                tensors = {n: t[order] if t.dim() > 0 else t for n, t in engine.carrier.tensors().items()}
                engine.carrier.load(tensors)
        return found


def resumed(engine: Engine, config: Config, lanes: range) -> Engine:
    """Another engine that starts where this one is."""
    weights = {name: weight.clone() for name, weight in engine.weights()}
    state = {name: tensor.clone() for name, tensor in engine.optimizer.state()}
    other = Engine(config, engine.groups, weights.__getitem__)
    other.optimizer.load_state(state.__getitem__, engine.optimizer.accepted_steps)
    other.start_phase(0, lanes)
    assert engine.carrier is not None
    assert other.carrier is not None
    other.carrier.load(engine.carrier.tensors())
    return other


@functools.cache
def of_one_process(mode: StateMode) -> list[float]:
    (found,) = run_distributed(losses, 1, config_of(mode, ParallelConfig()))
    return found


FAST = {("pp2-virtual2", "passing"), ("pp2-virtual2", "tbtt"), ("dp2", "fitted"), ("dp2", "random"), ("dp2", "passing")}
CASES = [
    pytest.param(mode, layout, marks=[] if (layout, mode) in FAST else pytest.mark.slow, id=f"{layout}-{mode}")
    for layout in LAYOUTS
    for mode in MODES
]


@pytest.mark.gloo
@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_losses_are_those_of_one_process(mode: StateMode, layout: str) -> None:
    parallel, ranks = LAYOUTS[layout]
    recompute = Recompute.layer if layout in ("pp2", "tp2-pp2") else Recompute.none
    for found in run_distributed(losses, ranks, config_of(mode, replace(parallel, recompute=recompute))):
        assert found == pytest.approx(of_one_process(mode), rel=1e-4)


@pytest.mark.gloo
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_as_if_it_had_not_stopped(mode: StateMode) -> None:
    (found,) = run_distributed(losses, 1, config_of(mode, ParallelConfig()), False, 7)
    assert found == of_one_process(mode)


@pytest.mark.gloo
def test_modes_and_lanes_make_a_difference() -> None:
    """What the other tests compare depends on the states: every mode, and whose state it is."""
    assert len({tuple(of_one_process(mode)) for mode in MODES}) == len(MODES)
    for mode in (StateMode.passing, StateMode.tbtt):
        (swapped,) = run_distributed(losses, 1, config_of(mode, ParallelConfig()), True)
        assert swapped != pytest.approx(of_one_process(mode), rel=1e-4)
