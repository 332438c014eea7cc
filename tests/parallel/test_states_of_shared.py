"""Carried states of models like Zamba2: a block at several depths has a state at each, on any stage."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import Config, ParallelConfig, StateMode
from tests.distributed import run_distributed
from tests.parallel.test_states import LAYERS, LAYOUTS, MODES, STOPPED, VOCABULARY, config_of, losses, resumed
from tests.parallel.test_states_of_recurrences import losses_without

SPAN = {name: value for name, value in LAYERS["X"].items() if name != "kind"}
BLOCK = {"kind": "shared_span", "hidden": 24, "rank": 3, "adapt_attention": True, **SPAN}
MODEL = ModelConfig(32, VOCABULARY, "MBSMBS", {"M": LAYERS["M"], "S": LAYERS["S"], "B": BLOCK})
LR = 2e-3


def shared(mode: StateMode, parallel: ParallelConfig) -> Config:
    config = config_of(mode, parallel)
    return replace(config, model=MODEL, phases=[replace(config.phases[0], lr=LR)])


@functools.cache
def of_one_process(mode: StateMode) -> list[float]:
    (losses_of_run,) = run_distributed(losses, 1, shared(mode, ParallelConfig()))
    return losses_of_run


CASES = [
    pytest.param(mode, layout, marks=pytest.mark.slow) for layout in ("pp2", "tp2-sp", "tp2-pp2") for mode in MODES
]


@pytest.mark.gloo
@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_losses_of_shared_blocks_equal_one_process(mode: StateMode, layout: str) -> None:
    parallel, ranks = LAYOUTS[layout]
    for of_rank in run_distributed(losses, ranks, shared(mode, parallel)):
        assert of_rank == pytest.approx(of_one_process(mode), rel=1e-4)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("pp2", "tp2-sp"), ("tp2-pp2", "serial")])
def test_run_of_shared_blocks_resumes_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    continued, _ = resumed(before, after, functools.partial(shared, StateMode.tbtt), tmp_path)
    assert continued == pytest.approx(of_one_process(StateMode.tbtt)[STOPPED:], rel=1e-4)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 4])
def test_losses_depend_on_the_state_of_every_place(layer: int) -> None:
    """If one place forgets its state after every step, the losses change."""
    (without,) = run_distributed(losses_without, 1, shared(StateMode.tbtt, ParallelConfig()), layer)
    expected = of_one_process(StateMode.tbtt)
    assert max(abs(ours - theirs) / theirs for ours, theirs in zip(without, expected, strict=True)) > 1e-3
