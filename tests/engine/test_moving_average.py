"""The moving average of the weights (`run.ema`), compared with a formula, under layouts and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of, valid_checkpoints
from hybridtron.checkpoint.restore import PhaseBoundary, restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, OptimConfig, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.optimizers.muon import MuonOptions
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import random_batch, serving, small_run
from tests.distributed import run_distributed
from tests.slow import slow_except

LR = 1e-2
DECAY = 0.6  # its reciprocal, 1 / (1 - DECAY), is below the number of steps
STEPS = 5
# largest difference from one process, relative to the weight's norm; sums of gradients round differently in bf16
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
MODEL = small_model("M-W-", tied=True, heads={"kv_heads": 2})
Tensors = dict[str, Tensor]


def averaging(config: Config, decay: float | None = DECAY) -> Config:
    return replace(config, run=replace(config.run, ema=decay))


def configured(layout: Layout, distributed: bool = True, precision: str = "bf16") -> Config:
    config = small(MODEL, layout.on(ParallelConfig()), Documents.isolate, data=layout.data)
    parallel = replace(config.parallel, distributed_optimizer=distributed)
    phases = [replace(config.phases[0], global_batch=4 * config.phases[0].micro_batch)]
    rounded = small_run(precision=precision).precision
    optim = replace(config.optim, eps=1e-4, clip=1e9)
    return averaging(replace(config, parallel=parallel, phases=phases, precision=rounded, optim=optim))


def next_average(average: Tensor, weight: Tensor, step: int) -> Tensor:
    """The formula in float64. The step is the number of accepted steps, from 1 on."""
    decay = min(DECAY, (step - 1) / step)
    return decay * average + (1 - decay) * weight.double()


def masters(engine: Engine) -> Tensors:
    return {name: s.master.detach().clone() for name, s in engine.optimizer.shards.items() if s.master is not None}


@pytest.mark.parametrize(
    ("optim", "precision"),
    [
        (OptimConfig(), "fp32"),
        (OptimConfig(), "bf16"),
        (OptimConfig(name="muon", muon=MuonOptions()), "bf16"),
    ],
    ids=["fp32", "bf16", "muon"],
)
def test_average_follows_the_formula_and_ignores_refused_steps(
    optim: OptimConfig, precision: str, alone: Groups
) -> None:
    engine = Engine(resolve(averaging(small_run(optim=optim, precision=precision)))[0], alone)
    expected = {name: torch.zeros_like(master).double() for name, master in masters(engine).items()}
    accepted = 0
    for step in range(STEPS + 1):
        engine.forward_backward([random_batch()])
        wanted = step != 2
        assert engine.optimizer.apply_update(LR, engine.optimizer.grad_norm(), wanted) is wanted
        if wanted:
            accepted += 1
            for name, master in masters(engine).items():
                expected[name] = next_average(expected[name], master, accepted)
    for name, average in expected.items():
        shard = engine.optimizer.shards[name]
        assert shard.average.dtype == torch.float32
        torch.testing.assert_close(shard.average, average.float(), rtol=1e-6, atol=1e-8, msg=name)
        assert not torch.equal(shard.average, shard.master)


def test_no_average_is_kept_by_default(alone: Groups) -> None:
    engine = Engine(resolve(small_run())[0], alone)
    assert all(shard.average is None for shard in engine.optimizer.shards.values())
    assert not any(block.key.startswith("ema.") for block in engine.optimizer.blocks())


def take_steps(engine: Engine, numbers: range) -> None:
    batches = micro_batches(engine.phase)
    count = len(batches) // engine.groups.data.size
    own_batches = batches[engine.groups.data.rank * count :][:count]
    for step in numbers:
        engine.forward_backward(own_batches, step)
        assert engine.step(LR)[1]


def trained(seat: Seat, config: Config, folder: Path, first: int, last: int, every: int = 1) -> tuple[int, int]:
    """Write checkpoints into a run's folder, resumed from its step `first`; the bytes held, and those planned."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        if first:
            restore_newest([Checkpoint.open(folder_of(folder, first))], serving(engine), folder)
        tokenizer = folder.with_suffix(".json")
        tokenizer.write_text("{}")
        saver = Saver(RunPlan.of(config), folder, groups)
        for step in range(first, last):
            take_steps(engine, range(step, step + 1))
            if (step + 1) % every == 0 or step + 1 == last:
                saver.save(engine, meta_of(engine, step + 1, {}), tokenizer)
                saver.settle()
        held = []
        for shard in engine.optimizer.shards.values():
            held += [*shard.parts.values(), *[t for t in (shard.average,) if t is not None]]
            if shard.master is not None and shard.weight.dtype != shard.master.dtype:
                held.append(shard.master)
        size = sum(tensor.nbytes for tensor in held if tensor.dim())
        planned = plan(resolve(config)[0], groups.world_size).ranks[groups.pipeline.rank].memory.optimizer
        return size, planned


def kept_all(config: Config) -> Config:
    return replace(config, checkpoint=replace(config.checkpoint, keep=STEPS))


def tensors(checkpoint: Checkpoint, prefix: str) -> Tensors:
    return {key.removeprefix(prefix): checkpoint.whole(key) for key in checkpoint.shapes if key.startswith(prefix)}


@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "distributed", "precision"),
    slow_except(
        [
            (Layout(data=2), True, "bf16"),
            (Layout(tensor=2), True, "fp32"),
            (Layout(data=2), True, "fp32"),
            (Layout(data=2), False, "fp32"),
            (Layout(pipeline=2), True, "bf16"),
            (Layout(pipeline=2), True, "fp32"),
            (Layout(tensor=2, data=2), True, "fp32"),
        ],
        (Layout(data=2), True, "bf16"),
        (Layout(tensor=2), True, "fp32"),
    ),
    ids=str,
)
def test_average_under_a_layout(layout: Layout, distributed: bool, precision: str, tmp_path: Path) -> None:
    """Ranks together store the average of their masters, close to that of one process, in the planned memory."""
    config = kept_all(configured(layout, distributed, precision))
    sizes = run_distributed(trained, layout.world_size, config, tmp_path / "several", 0, STEPS)
    one_process = kept_all(configured(Layout(), False, precision))
    (serial,) = run_distributed(trained, 1, one_process, tmp_path / "serial", 0, STEPS)
    assert serial[0] == serial[1]
    assert sum(held for held, _ in sizes) == pytest.approx(sum(planned for _, planned in sizes), rel=0.02)
    expected: Tensors = {}
    for step in range(1, STEPS + 1):
        checkpoint = Checkpoint.open(folder_of(tmp_path / "several", step))
        stored = tensors(checkpoint, "ema.")
        for name in stored:
            master = checkpoint.whole(checkpoint.widest(name))
            expected[name] = next_average(expected.get(name, torch.zeros(()).double()), master, step)
    alone = tensors(Checkpoint.open(folder_of(tmp_path / "serial", STEPS)), "ema.")
    assert stored.keys() == alone.keys()
    for name, average in stored.items():
        torch.testing.assert_close(average, expected[name].float(), rtol=1e-6, atol=1e-8, msg=name)
        assert (average - alone[name]).norm() <= TOLERANCES[precision] * alone[name].norm(), name


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_resumed_average_has_the_same_bits(tmp_path: Path) -> None:
    """On the same layout a resume changes no bit; another layout loads the average bit for bit."""
    config = kept_all(configured(Layout(data=2)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_distributed(trained, 2, config, whole, 0, STEPS, STEPS)
    run_distributed(trained, 2, config, parts, 0, 3, 3)
    run_distributed(trained, 2, config, parts, 3, STEPS, STEPS)
    ended, resumed = (tensors(Checkpoint.open(folder_of(folder, STEPS)), "ema.") for folder in (whole, parts))
    assert ended
    assert ended.keys() == resumed.keys()
    assert all(torch.equal(average, resumed[name]) for name, average in ended.items())
    (resharded,) = run_distributed(loaded, 1, kept_all(configured(Layout(), False)), parts)
    assert resharded.keys() == ended.keys()
    assert all(torch.equal(average, resharded[name]) for name, average in ended.items())


def loaded(seat: Seat, config: Config, folder: Path) -> Tensors:
    """Load the newest checkpoint on one process; the averages by their keys in a checkpoint."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        restore_newest(valid_checkpoints(folder), serving(engine), folder)
        prefix = "ema."
        return {
            block.key.removeprefix(prefix): block.data.clone()
            for block in engine.optimizer.blocks()
            if block.key.startswith(prefix)
        }


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("has_average", [False, True])
def test_average_at_the_start_of_a_phase(moments: bool, has_average: bool, alone: Groups, tmp_path: Path) -> None:
    """It continues if the moments do and the checkpoint has it; otherwise it starts as the weight."""
    config = small_run(precision="bf16")
    before = Engine(resolve(averaging(config) if has_average else config)[0], alone)
    for _ in range(3):
        before.forward_backward([random_batch()])
        before.step(LR)
    (tmp_path / "tokenizer.json").write_text("{}")
    Saver(RunPlan.of(config), tmp_path, alone).save(before, meta_of(before, 3, {}), tmp_path / "tokenizer.json")
    checkpoint = Checkpoint.open(folder_of(tmp_path, 3))
    engine = Engine(resolve(averaging(config))[0], alone)
    restore_newest([checkpoint], lambda _: (engine, PhaseBoundary(checkpoint, moments)), tmp_path)
    continues = moments and has_average
    for name, shard in engine.optimizer.shards.items():
        old = before.optimizer.shards[name]
        expected = old.average if continues else old.master
        assert torch.equal(shard.average, expected.detach().view_as(shard.average)), name
    engine.forward_backward([random_batch()])
    engine.step(LR)
    assert engine.optimizer.accepted_steps == (4 if moments else 1)
    for shard in engine.optimizer.shards.values():
        assert torch.equal(shard.average, shard.master) is not moments
