"""An optimizer's moments in bf16 between steps, compared with a formula that rounds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.choices import KeptFormat
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import serving, small_run
from tests.distributed import run_distributed

MODEL = small_model("M-W-", tied=True, heads={"kv_heads": 2})
KINDS = ("exp_avg", "exp_avg_sq")
LR = 1e-3
STEPS = 4
SAVED = 2


def configured(layout: Layout, moments: KeptFormat = KeptFormat.bf16) -> Config:
    config = small(MODEL, layout.on(ParallelConfig()), Documents.isolate, data=layout.data)
    precision = replace(small_run(precision="bf16").precision, moments=moments)
    phases = [replace(config.phases[0], global_batch=4 * config.phases[0].micro_batch)]
    optim = replace(config.optim, eps=1e-4, clip=1e9, weight_decay=0.0)
    return replace(config, precision=precision, optim=optim, phases=phases)


def take_steps(engine: Engine, numbers: range) -> None:
    batches = micro_batches(resolve(engine.config)[0])
    count = len(batches) // engine.groups.data.size
    mine = batches[engine.groups.data.rank * count : (engine.groups.data.rank + 1) * count]
    for step in numbers:
        engine.forward_backward(mine, step)
        assert engine.step(LR)[1]


def kept(engine: Engine) -> dict[str, list[Tensor]]:
    """Return the optimizer's moments and its masters of narrower weights on this rank."""
    shards = engine.optimizer.shards.values()
    masters = [s.master for s in shards if s.master is not None and s.weight.dtype != s.master.dtype]
    return {"moments": [s.parts[kind] for s in shards for kind in KINDS if kind in s.parts], "masters": masters}


def trained(seat: Seat, config: Config, folder: Path | None = None) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """The weights after the last step, with the bytes kept and those planned; a folder is written, or resumed from."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        first = 0
        if folder is not None and folder.exists():
            restore_newest(valid_checkpoints(folder), serving(engine), folder)
            first = SAVED
        take_steps(engine, range(first, SAVED))
        if folder is not None and first == 0:
            folder.with_suffix(".json").write_text("{}")
            saver = Saver(RunPlan.of(config), folder, groups)
            saver.save(engine, meta_of(engine, SAVED, {}), folder.with_suffix(".json"))
        take_steps(engine, range(SAVED, STEPS))
        held = kept(engine)
        assert {moment.dtype for moment in held["moments"]} == {getattr(torch, _format_of(config))}
        planned = plan(resolve(config)[0], groups.world_size).ranks[groups.pipeline.rank].memory.optimizer
        return dict(engine.weights()), (sum(t.nbytes for t in [*held["moments"], *held["masters"]]), planned)


def _format_of(config: Config) -> str:
    return {KeptFormat.fp32: "float32", KeptFormat.bf16: "bfloat16"}[config.precision.moments]


def test_steps_equal_the_formulas_with_rounded_moments(alone: Groups) -> None:
    engine = Engine(resolve(configured(Layout()))[0], alone)
    state = {}
    masters = {name: shard.master.detach().clone() for name, shard in engine.optimizer.shards.items()}
    for step in range(STEPS):
        engine.forward_backward(micro_batches(resolve(engine.config)[0]), step)
        for name, gradient in engine.optimizer.gradients():
            mean, square = state.setdefault(name, [torch.zeros_like(gradient).bfloat16() for _ in KINDS])
            m = 0.9 * mean.double() + 0.1 * gradient.double()
            v = 0.95 * square.double() + 0.05 * gradient.double() ** 2
            direction = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + engine.config.optim.eps)
            masters[name] -= LR * direction.view_as(masters[name])
            mean.copy_(m)
            square.copy_(v)
        assert engine.step(LR)[1]
    for name, shard in engine.optimizer.shards.items():
        moved = (shard.master - masters[name]).abs().max()
        assert moved <= 1e-3 * LR, f"{name}: {moved}"
        for kind, expected in zip(KINDS, state[name], strict=True):  # another order of sums may round to a neighbour
            torch.testing.assert_close(shard.parts[kind], expected.view(-1), rtol=2.0**-7, atol=0.0)


def stored_moments(folder: Path) -> dict[str, Any]:
    checkpoint = next(iter(valid_checkpoints(folder)))
    return {key: checkpoint.whole(key) for key in checkpoint.shapes if key.startswith(KINDS)}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(data=2), id="dp2"),
        pytest.param(Layout(tensor=2), id="tp2", marks=pytest.mark.slow),
        pytest.param(Layout(pipeline=2, data=2), id="pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_runs_of_either_moment_format_are_saved_and_resumed(layout: Layout, tmp_path: Path) -> None:
    """The optimizer's memory agrees with the plan.

    A checkpoint stores the moments as they are, and a run can resume from it with the other format.
    """
    ranks = layout.tensor * layout.pipeline * layout.data
    folder = tmp_path / "run"
    ((alone, _),) = run_distributed(trained, 1, configured(Layout()))
    cut = run_distributed(trained, ranks, configured(layout), folder)
    held, planned = (sum(sizes[which] for _, sizes in cut) for which in (0, 1))
    assert held == pytest.approx(planned, abs=ranks)  # data ranks' shares end where they may, planned ones are alike
    assert_near(cut[0][0], alone)
    assert {moment.dtype for moment in stored_moments(folder).values()} == {torch.bfloat16}
    ((wide, _),) = run_distributed(trained, 1, configured(Layout(), KeptFormat.fp32), folder)
    assert_near(wide, alone)
    (narrow, _), *_ = run_distributed(trained, ranks, configured(layout), folder)
    assert all(narrow[name].equal(weight) for name, weight in cut[0][0].items())


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """An entry whose gradient is no more than rounding may step the other way; few do, with moments in fp32 as well."""
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        apart = (actual[name].float() - weight.float()).abs()
        assert apart.max() <= 2.0**-7 * weight.abs().max() + 2 * LR, name
        far = apart > 2.0**-7 * weight.float().abs() + STEPS * LR / 4
        assert far.float().mean() <= 0.005, name
