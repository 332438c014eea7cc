"""Carried states in every layout: the losses of one process, step by step, in every mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.checkpoint.folder import newest, valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest, restore_states
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import (
    Config,
    DataConfig,
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
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from tests.conftest import serving
from tests.distributed import run_distributed

STEPS = 20
LANES = 8
ROWS = 2
LENGTH = 16
VOCABULARY = 32
LR = 1e-2
LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 8, "groups": 2},
    "W": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 8},
    "X": {
        "kind": "span",
        "heads": 4,
        "kv_heads": 2,
        "chunk": [4, 8],
        "block": 2,
        "blocks": 2,
        "relevance": "previous_chunk",
        "remember": 8,
    },
    "-": {"kind": "swiglu", "hidden": 48},
}
STOPPED = 7  # where a run is stopped
LAYOUTS = {
    "serial": (ParallelConfig(), 1),
    "tp2": (ParallelConfig(tensor=2), 2),
    "tp2-sp": (ParallelConfig(tensor=2, sequence=True), 2),
    "pp2": (ParallelConfig(pipeline=2), 2),
    "pp2-virtual2": (ParallelConfig(pipeline=2, virtual_pipeline=2), 2),
    "dp2": (ParallelConfig(), 2),
    "tp2-pp2": (ParallelConfig(tensor=2, pipeline=2), 4),
}
ROW_LAYOUTS = {  # of models whose layers all hand over what comes before a share
    "cp2": (ParallelConfig(context=2), 2),
    "cp4": (ParallelConfig(context=4), 4),
    "cp2-tp2": (ParallelConfig(context=2, tensor=2, sequence=True), 4),
    "cp2-pp2": (ParallelConfig(context=2, pipeline=2), 4),
    "cp2-dp2": (ParallelConfig(context=2), 4),
}
MODES = [mode for mode in StateMode if mode is not StateMode.zero]


def config_of(mode: StateMode, parallel: ParallelConfig) -> Config:
    return Config(
        model=ModelConfig(width=32, vocab_size=VOCABULARY, pattern="M-SXWM", layers=LAYERS),
        data=DataConfig(path="unused"),
        optim=OptimConfig(eps=1e-3),  # a coarse one, as rounding may turn the sign of a tiny gradient
        parallel=parallel,
        states=StatesConfig(mode=mode, sigma=0.5, dropout=0.3),
        run=RunConfig(name="test", dir="unused"),
        phases=[PhaseConfig(tokens="1M", seq_len=LENGTH, global_batch=LANES, micro_batch=ROWS, lr=LR)],
    )


def step_of(step: int) -> Batch:
    """Return all lanes' batch in a step, with masks of unequal weight and some document boundaries.

    A lane's text repeats a token of its own after a first one that all lanes share. The first tokens count in the loss:
    their successors are known from the state alone.
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


def losses(seat: Seat, config: Config, swapped: bool = False) -> list[float]:
    """The loss of each step; `swapped` exchanges two lanes' states after each."""
    with seat.groups(config.parallel) as groups:
        engine = started(config, groups)
        return list(steps_of(engine, range(STEPS), swapped))


def started(config: Config, groups: Groups) -> Engine:
    engine = Engine(resolve(config)[0], groups)
    lanes_per_rank = LANES // groups.data.size
    engine.start_phase(engine.phase, range(groups.data.rank * lanes_per_rank, (groups.data.rank + 1) * lanes_per_rank))
    return engine


def steps_of(engine: Engine, steps: range, swapped: bool = False) -> Iterator[float]:
    """Yield each step's loss."""
    assert engine.carrier is not None
    lanes = engine.carrier.lanes
    for step in steps:
        batch = step_of(step).map(lambda tensor: tensor[lanes.start : lanes.stop])
        yield engine.forward_backward(batch.split(ROWS), step).mean.item()
        engine.step(engine.config.phases[0].lr)
        if swapped:
            order = [1, 0, *range(2, len(lanes))]
            for parts in engine.carrier.lane_states.values():
                parts.update({name: tensor[order] for name, tensor in parts.items()})


def first_steps(seat: Seat, config: Config, folder: Path) -> None:
    """Train to the step STOPPED and write a checkpoint."""
    with seat.groups(config.parallel) as groups:
        engine = started(config, groups)
        list(steps_of(engine, range(STOPPED)))
        write(engine, folder)


def further_steps(seat: Seat, config: Config, folder: Path, again: Path) -> list[float]:
    """The losses from STOPPED on, from the checkpoint, which is written again as this layout holds it."""
    with seat.groups(config.parallel) as groups:
        engine = started(config, groups)
        assert engine.carrier is not None
        checkpoint = restore_newest(valid_checkpoints(folder), serving(engine), folder)
        restore_states(engine.carrier, groups, checkpoint)
        write(engine, again)
        return list(steps_of(engine, range(STOPPED, STEPS)))


def resumed(
    before: str, after: str, configured: Callable[[ParallelConfig], Config], tmp: Path
) -> tuple[list[float], set[str]]:
    """Stop a run in one layout and resume it in another; return its losses and the stored keys except random states.

    Stored values are equal bit for bit when the other layout writes them again.
    """
    layouts = LAYOUTS | ROW_LAYOUTS
    (first, ranks) = layouts[before]
    (second, other_ranks) = layouts[after]
    run_distributed(first_steps, ranks, configured(first), tmp / "a")
    continued = run_distributed(further_steps, other_ranks, configured(second), tmp / "a", tmp / "b")
    held, again = (newest(tmp / folder) for folder in ("a", "b"))
    assert held is not None
    assert again is not None
    whole = {key for key in held.shapes if not key.startswith("random.")}
    assert whole == {key for key in again.shapes if not key.startswith("random.")}
    assert all(torch.equal(held.whole(key), again.whole(key)) for key in whole), "bit for bit"
    return continued[0], whole


def write(engine: Engine, folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    if engine.groups.is_first:
        folder.mkdir(exist_ok=True)
        tokenizer.write_text("{}")
    Saver(RunPlan.of(engine.config), folder, engine.groups).save(engine, meta_of(engine, STOPPED, {}), tokenizer)


@functools.cache
def of_one_process(mode: StateMode) -> list[float]:
    (losses_of_run,) = run_distributed(losses, 1, config_of(mode, ParallelConfig()))
    return losses_of_run


FAST = {("dp2", "fitted")}
CASES = [
    pytest.param(mode, layout, marks=[pytest.mark.slow] * ((layout, mode) not in FAST), id=f"{layout}-{mode}")
    for layout in LAYOUTS
    for mode in MODES
    if layout != "serial"
]


@pytest.mark.gloo
@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_losses_of_layouts_equal_one_process(mode: StateMode, layout: str) -> None:
    parallel, ranks = LAYOUTS[layout]
    if layout in ("pp2", "tp2-pp2"):
        parallel = replace(parallel, recompute=Recompute.layer)
    for of_rank in run_distributed(losses, ranks, config_of(mode, parallel)):
        assert of_rank == pytest.approx(of_one_process(mode), rel=1e-4)


PAIRS = [
    ("serial", "serial"),
    ("serial", "tp2"),
    ("serial", "pp2"),
    ("serial", "dp2"),
    ("tp2", "serial"),
    ("tp2", "pp2"),
    ("tp2", "dp2"),
    ("tp2-sp", "tp2-pp2"),
    ("pp2", "tp2"),
    ("pp2", "pp2-virtual2"),
    ("pp2-virtual2", "dp2"),
    ("dp2", "serial"),
    ("dp2", "tp2-pp2"),
    ("dp2", "pp2-virtual2"),
    ("tp2-pp2", "dp2"),
    ("tp2-pp2", "serial"),
]
QUICK = [("dp2", "tp2-pp2", StateMode.tbtt)]
RESUMED = [
    pytest.param(
        before,
        after,
        mode,
        marks=[pytest.mark.slow] * ((before, after, mode) not in QUICK),
        id=f"{before}-to-{after}-{mode}",
    )
    for pair, (before, after) in enumerate(PAIRS)
    for turn, mode in enumerate(MODES)
    if (before, after, mode) in QUICK or pair % len(MODES) == turn or before == after
]


@pytest.mark.gloo
@pytest.mark.parametrize(("before", "after", "mode"), RESUMED)
def test_resumed_run_has_the_losses_of_an_uninterrupted_one(
    before: str, after: str, mode: StateMode, tmp_path: Path
) -> None:
    continued, _ = resumed(before, after, functools.partial(config_of, mode), tmp_path)
    expected = of_one_process(mode)[STOPPED:]
    if before == after == "serial":
        assert continued == expected
    else:
        assert continued == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.gloo
def test_losses_depend_on_the_mode_and_on_the_lane_of_a_state() -> None:
    """The compared losses depend on the states: on the mode, and on the lane that a state belongs to."""
    assert len({tuple(of_one_process(mode)) for mode in MODES}) == len(MODES)
    for mode in (StateMode.passing, StateMode.tbtt):
        (swapped,) = run_distributed(losses, 1, config_of(mode, ParallelConfig()), True)
        assert swapped != pytest.approx(of_one_process(mode), rel=1e-4)
