"""Rows too long for one process, over two ranks: the results equal gradients through all chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.resolve import resolve
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

VOCABULARY = 32
STEPS = 2
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
    """Return one row, in which a token is the one before it plus at most two."""
    first = torch.tensor([7])
    steps_T = torch.randint(3, (length,), generator=torch.Generator().manual_seed(0))
    tokens_BT = torch.cat((first, (first + steps_T.cumsum(0)) % VOCABULARY)).unsqueeze(0)
    mask_BL = torch.ones(1, length, dtype=torch.bool)
    begins_B = torch.zeros(1, dtype=torch.bool)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo.stream(1, length), begins_B)


def trained(seat: Seat, config: Config, length: int) -> list[float]:
    """The loss of each step."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        step_losses = []
        engine.start_phase(engine.phase, range(1))
        for step in range(STEPS):
            step_losses.append(engine.forward_backward([text(length)], step).mean.item())
            engine.step(1e-2)
        return step_losses


@pytest.mark.gloo
@pytest.mark.parametrize("length", [4_096, pytest.param(262_144, marks=pytest.mark.slow)])
def test_row_over_two_ranks_trains_as_its_chunks_through_time(length: int) -> None:
    (expected,) = run_distributed(trained, 1, config_of(length, 64, 1), length)
    for step_losses in run_distributed(trained, 2, config_of(length, 1, 2), length):
        assert step_losses == pytest.approx(expected, rel=1e-4)
    assert expected[1] < expected[0] - 1e-2


def held(seat: Seat, config: Config, length: int, folder: Path) -> int:
    """The most bytes that passes forward and backward hold beside weights, gradients and optimizer."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        engine.start_phase(engine.phase, range(1))
        engine.forward_backward([text(length)], 0)  # what is made once
        engine.step(1e-2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.forward_backward([text(length)], 1)
        trace = folder / f"{groups.rank}.json"
        profiled.export_chrome_trace(str(trace))
        events = [
            event["args"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"
        ]
        begin = events[0]["Total Allocated"] - events[0]["Bytes"]
        return max(event["Total Allocated"] for event in events) - begin


@pytest.mark.gloo
def test_activations_of_a_rank_take_its_share_of_the_memory(tmp_path: Path) -> None:
    """Halos, states and the tokens of whole rows are within the 10%."""
    length = 8_192
    (whole,) = run_distributed(held, 1, config_of(length, 1, 1), length, tmp_path)
    for ranks in (2, 4):
        for share in run_distributed(held, ranks, config_of(length, 1, ranks), length, tmp_path):
            assert share * ranks == pytest.approx(whole, rel=0.1)
