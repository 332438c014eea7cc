"""TBTT through the chunks of a step: the whole row's loss and gradients, and memory that recompute keeps flat."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridtron.config.check import check
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import (
    Config,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    Recompute,
    StateKind,
    StateMode,
    StatesConfig,
)
from hybridtron.data.batch import Batch
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import SMALL_LAYERS, random_batch, small_config, small_run
from tests.live import Live

LANES = 4
ROWS = 2
LENGTH = 12
CHUNKS = 3
WHOLE_ROWS = [[36], [12, 24], [5, 13, 18], [24, 12]]  # borders within chunks, and where a chunk begins


def run_of(pattern: str = "MSC-", recompute: str = "none", **states: object) -> Config:
    model = small_config(pattern)
    model.layers = {**SMALL_LAYERS, "C": {"kind": "attention", "heads": 2, "window": 11, "conv": 4}}
    chunks = states.get("chunks", 1)
    assert isinstance(chunks, int)
    phase = PhaseConfig(tokens="1M", seq_len=LENGTH, global_batch=LANES * chunks, micro_batch=ROWS, lr=1e-3)
    return dataclasses.replace(
        small_run(model, OptimConfig(clip=1e9)),  # Megatron clips in fp32 only
        states=StatesConfig(**states),  # type: ignore[arg-type]
        phases=[phase],
        parallel=ParallelConfig(recompute=Recompute(recompute), distributed_optimizer=False),
    )


def tbtt(
    chunks: int = CHUNKS, through_time: bool = True, recompute: str = "none", pattern: str = "MSC-", **other: object
) -> Config:
    return run_of(pattern, recompute, mode=StateMode.tbtt, chunks=chunks, through_time=through_time, **other)


def engine_of(config: Config, alone: Groups) -> Engine:
    assert not check(RunPlan.of(config))
    engine = Engine(resolve(config)[0], alone, dtype=torch.float64)
    engine.start_phase(engine.phase, range(LANES))
    return engine


def rows_of(documents: list[list[int]] | None, chunks: int = CHUNKS) -> Batch:
    batch = random_batch(rows=LANES, length=LENGTH * chunks, documents=documents)
    return dataclasses.replace(batch, continues_B=torch.zeros(LANES, dtype=torch.bool))


def gradients(engine: Engine, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = engine.forward_backward(batches).mean.item()
    return loss, {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, whole in expected.items() if (actual[n] - whole).norm() > 1e-9 * whole.norm() + 1e-12]


@pytest.mark.parametrize(
    ("recompute", "documents"),
    [("none", None), ("none", WHOLE_ROWS), ("selective", None), ("layer", WHOLE_ROWS)],
    ids=["stream", "documents", "selective", "layer"],
)
def test_chunks_through_time_equal_the_whole_row(
    alone: Groups, recompute: str, documents: list[list[int]] | None
) -> None:
    batch = rows_of(documents)
    expected, whole = gradients(engine_of(run_of(), alone), batch.split(ROWS))
    loss, through = gradients(engine_of(tbtt(recompute=recompute), alone), batch.split(ROWS))
    assert loss == pytest.approx(expected, rel=1e-12)
    assert not differing(through, whole)


def test_detached_chunks_have_equal_losses_and_other_gradients(alone: Groups) -> None:
    batch = rows_of(None)
    loss, through = gradients(engine_of(tbtt(), alone), batch.split(ROWS))
    groups = [group.chunks(CHUNKS) for group in batch.split(ROWS)]
    detached = engine_of(tbtt(through_time=False), alone)
    detached_loss, cut = gradients(detached, [group[turn] for turn in range(CHUNKS) for group in groups])
    assert detached_loss == pytest.approx(loss, rel=1e-12)
    assert len(differing(cut, through)) > 10
    joined = engine_of(tbtt(), alone)
    gradients(joined, batch.split(ROWS))
    for engine in (joined, detached):
        engine.step(0.0)
    assert joined.carrier is not None
    assert detached.carrier is not None
    for layer, parts in detached.carrier.lane_states.items():
        for name, tensor in parts.items():
            torch.testing.assert_close(joined.carrier.lane_states[layer][name], tensor)


def test_next_step_continues_without_a_gradient(alone: Groups) -> None:
    """Two consecutive steps with two chunks have the loss of one step with four, and no gradient between them."""
    batch = rows_of(None, chunks=4)
    whole, _ = gradients(engine_of(tbtt(chunks=4), alone), batch.split(ROWS))
    engine = engine_of(tbtt(chunks=2), alone)
    loss_sum = 0.0
    for half in batch.chunks(2):
        loss_sum += gradients(engine, half.split(ROWS))[0] * half.mask_BL.sum().item()
        assert engine.carrier is not None
        assert not any(t.requires_grad for parts in engine.carrier.lane_states.values() for t in parts.values())
        engine.step(0.0)
    assert loss_sum / batch.mask_BL.sum().item() == pytest.approx(whole, rel=1e-12)


def test_chosen_states_alone_are_handed_over(alone: Groups) -> None:
    """With only recurrent states carried, the loss equals that of chunks in detached runs."""
    batch = rows_of(None)
    chosen = {"carry": [StateKind.ssm], "layers": [0]}
    loss, _ = gradients(engine_of(tbtt(**chosen), alone), batch.split(ROWS))
    groups = [group.chunks(CHUNKS) for group in batch.split(ROWS)]
    detached = engine_of(tbtt(through_time=False, **chosen), alone)
    detached_loss, _ = gradients(detached, [group[turn] for turn in range(CHUNKS) for group in groups])
    assert loss == pytest.approx(detached_loss, rel=1e-12)
    assert loss != pytest.approx(gradients(engine_of(tbtt(), alone), batch.split(ROWS))[0], rel=1e-6)


def peak(engine: Engine, batches: list[Batch]) -> int:
    with Live() as live:
        engine.forward_backward(batches)
    return live.peak


def test_recompute_keeps_memory_flat_but_for_states_between_chunks(alone: Groups) -> None:
    """Each further chunk adds only its initial states, its tokens, and the loss's inputs; nothing from its inside."""

    def peak_of(chunks: int, recompute: str) -> int:
        engine = engine_of(tbtt(chunks=chunks, recompute=recompute, pattern="S-"), alone)
        return peak(engine, rows_of(None, chunks).split(ROWS))

    few, many = (peak_of(chunks, "layer") for chunks in (3, 6))
    states = ROWS * (8 * 8 * 4 + 3 * 64 + 3 * 16) * 8  # in float64
    stream = ROWS * LENGTH * 32 * 8
    assert (many - few) / 3 < 1.1 * (states + stream)
    assert peak_of(6, "none") > 1.7 * many


@pytest.mark.parametrize(
    "states",
    [
        {"mode": StateMode.passing, "through_time": True},
        {"mode": StateMode.tbtt, "through_time": True},
        {"mode": StateMode.zero, "chunks": 2, "through_time": True},
    ],
    ids=lambda states: states["mode"].name,
)
def test_through_time_without_chunks_is_refused(states: dict[str, object]) -> None:
    problems = [(problem.key, problem.code) for problem in check(RunPlan.of(run_of(**states)))]
    assert ("states.through_time", "needs-other-key") in problems


def test_through_time_over_context_parallel_ranks_is_refused() -> None:
    """Rows that several ranks share are as long as the chunks together, and are read in one pass."""
    config = tbtt()
    assert not [problem for problem in check(RunPlan.of(config)) if problem.key == "parallel.context"]
    config = dataclasses.replace(config, parallel=ParallelConfig(context=2))
    assert ("parallel.context", "unsupported") in [(problem.key, problem.code) for problem in check(RunPlan.of(config))]
    without = dataclasses.replace(config, states=StatesConfig())
    assert ("parallel.context", "unsupported") not in [
        (problem.key, problem.code) for problem in check(RunPlan.of(without))
    ]
