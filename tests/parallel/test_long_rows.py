"""Rows that one process would have to cut: over two ranks they are what gradients through all their chunks are."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import (
    Config,
    DataConfig,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    RunConfig,
    StateMode,
    StatesConfig,
)
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed

VOCABULARY, STEPS = 32, 2
LAYERS = {
    "M": {"kind": "mamba", "state": 2, "expand": 1},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 8, "expand": 1},
    "W": {"kind": "attention", "heads": 2, "window": 16},
    "-": {"kind": "swiglu", "hidden": 16},
}
MODEL = ModelConfig(16, VOCABULARY, "M-WS", LAYERS)


def config_of(length: int, chunks: int, context: int) -> Config:
    """A row a step: as one, or as chunks that one process reads one after another, with gradients through all."""
    states = StatesConfig(mode=StateMode.tbtt, chunks=chunks, through_time=chunks > 1)
    phase = PhaseConfig(tokens="1M", seq_len=length // chunks, global_batch=chunks, micro_batch=1, lr=1e-2)
    return Config(
        model=MODEL,
        data=DataConfig(path="unused"),
        optim=OptimConfig(eps=1e-3),
        parallel=ParallelConfig(context=context),
        states=states,
        run=RunConfig(name="test", dir="unused"),
        phases=[phase],
    )


def text(length: int) -> Batch:
    """One row, in which a token is the one before it plus at most two."""
    first = torch.tensor([7])
    steps_T = torch.randint(3, (length,), generator=torch.Generator().manual_seed(0))
    tokens_BT = torch.cat((first, (first + steps_T.cumsum(0)) % VOCABULARY)).unsqueeze(0)
    mask_BL = torch.ones(1, length, dtype=torch.bool)
    begins_B = torch.zeros(1, dtype=torch.bool)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo.stream(1, length), begins_B)


def trained(seat: Seat, config: Config, length: int) -> list[float]:
    """The loss of each step."""
    with seat.groups(config.parallel) as groups:
        engine, found = Engine(config, groups), []
        engine.start_phase(0, range(1))
        for step in range(STEPS):
            found.append(engine.forward_backward([text(length)], step).mean.item())
            engine.step(1e-2)
        return found


@pytest.mark.gloo
@pytest.mark.parametrize("length", [4_096, pytest.param(262_144, marks=pytest.mark.slow)])
def test_a_row_over_two_ranks_trains_as_its_chunks_through_time(length: int) -> None:
    (expected,) = run_distributed(trained, 1, config_of(length, 64, 1), length)
    for found in run_distributed(trained, 2, config_of(length, 1, 2), length):
        assert found == pytest.approx(expected, rel=1e-4)
    assert expected[1] < expected[0] - 1e-2
