"""Carried states of the recurrences with a matrix for each head: one process's losses in other layouts, resumed too.

All of them stand in one model, and every one's state counts: without it other losses follow.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import Config, ParallelConfig, StateMode
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.parallel.test_states import (
    LAYERS,
    LAYOUTS,
    MODES,
    STEPS,
    STOPPED,
    VOCABULARY,
    config_of,
    losses,
    resumed,
    started,
    steps_of,
)

# a query at nearly right angles to its keys reads next to nothing, which the norm would enlarge with its rounding
LINEAR = {"norm_eps": 0.01}
MODEL = ModelConfig(
    32,
    VOCABULARY,
    "ARTDKNV-",
    {
        "A": {"kind": "gla", "heads": 2, "conv": 3, **LINEAR},
        "R": {"kind": "retnet", "heads": 2, **LINEAR},
        "T": {"kind": "mamba3", "state": 4, "head_dim": 8},
        "D": {"kind": "gated_deltanet", "heads": 4, "key_heads": 2, "negative_eigenvalues": True, **LINEAR},
        "K": {"kind": "kda", "heads": 2, "expand_k": 0.5, **LINEAR},
        "N": {"kind": "rwkv6", "head_dim": 8, "mix_rank": 3, "decay_rank": 5, **LINEAR},
        "V": {"kind": "rwkv6_channel_mix"},
        "-": LAYERS["-"],
    },
)
CARRYING = 7  # sub-layers
LR = 2e-3  # with a larger one rounding grows a hundredfold in ten steps


def recurrences(mode: StateMode, parallel: ParallelConfig) -> Config:
    config = config_of(mode, parallel)
    return replace(config, model=MODEL, phases=[replace(config.phases[0], lr=LR)])


@functools.cache
def of_one_process(mode: StateMode) -> list[float]:
    (losses_of_run,) = run_distributed(losses, 1, recurrences(mode, ParallelConfig()))
    return losses_of_run


CASES = [
    pytest.param(mode, layout, id=f"{layout}-{mode}")
    for layout in ("tp2", "tp2-sp", "pp2-virtual2", "dp2", "tp2-pp2")
    for mode in MODES
]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("mode", "layout"), CASES)
def test_losses_of_recurrences_equal_one_process(mode: StateMode, layout: str) -> None:
    parallel, ranks = LAYOUTS[layout]
    for of_rank in run_distributed(losses, ranks, recurrences(mode, parallel)):
        assert of_rank == pytest.approx(of_one_process(mode), rel=1e-4)


PAIRS = [("serial", "serial"), ("tp2-sp", "pp2"), ("pp2-virtual2", "tp2"), ("dp2", "tp2-pp2"), ("tp2-pp2", "dp2")]
RESUMED = [pytest.param(before, after, mode) for before, after in PAIRS for mode in MODES]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("before", "after", "mode"), RESUMED)
def test_run_of_recurrences_resumes_in_another_layout(before: str, after: str, mode: StateMode, tmp_path: Path) -> None:
    continued, _ = resumed(before, after, functools.partial(recurrences, mode), tmp_path)
    expected = of_one_process(mode)[STOPPED:]
    if before == after == "serial":
        assert continued == expected
    else:
        assert continued == pytest.approx(expected, rel=1e-4)


def losses_without(seat: Seat, config: Config, layer: int) -> list[float]:
    """The losses where one sub-layer forgets its state after every step."""
    step_losses = []
    with seat.groups(config.parallel) as groups:
        engine = started(config, groups)
        assert engine.carrier is not None
        for step in range(STEPS):
            step_losses += steps_of(engine, range(step, step + 1))
            for held in (parts for key, parts in engine.carrier.lane_states.items() if key == layer):
                held.update({name: torch.zeros_like(part) for name, part in held.items()})
    return step_losses


@pytest.mark.gloo
@pytest.mark.slow
def test_losses_depend_on_the_state_of_every_sub_layer() -> None:
    config = recurrences(StateMode.tbtt, ParallelConfig())
    expected = of_one_process(StateMode.tbtt)
    for layer in range(CARRYING):
        (without,) = run_distributed(losses_without, 1, config, layer)
        apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(without, expected, strict=True))
        assert apart > 1e-3, MODEL.pattern[layer]
