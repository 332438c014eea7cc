"""Weights gathered from a layout after some steps, and its checkpoint, equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.folder import newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Case, table
from tests.distributed import run_distributed

STEPS = 3


def state_after(seat: Seat, config: Config, folder: Path) -> dict[str, Tensor]:
    """The weights, as the first process gathers them, and nothing on the others; a checkpoint."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        batches = micro_batches(resolve(config)[0])
        count = len(batches) // groups.data.size
        for _ in range(STEPS):
            engine.forward_backward(batches[groups.data.rank * count :][:count])
            engine.optimizer.step(1e-2)
        tokenizer = folder / "tokenizer.json"
        if groups.is_first:
            folder.mkdir()
            tokenizer.write_text("{}")
        Saver(RunPlan.of(config), folder, groups).save(engine, meta_of(engine, STEPS, {}), tokenizer)
        return {name: weight.clone() for name, weight in engine.weights()}


def stored(folder: Path) -> dict[str, Tensor]:
    checkpoint = newest(folder)
    assert checkpoint is not None
    return {key: checkpoint.whole(key) for key in checkpoint.shapes if not key.startswith("random.")}


OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OPTIONS = {"distributed": {}, "plain": {"distributed_optimizer": False}, "overlapped": OVERLAPPED}
FAST = {("tp2-pp2", "distributed"), ("dp2", "overlapped")}
CASES = [
    pytest.param(
        case,
        options,
        id=f"{case.layout}-{name}",
        marks=[] if (case.layout, name) in FAST else pytest.mark.slow,
    )
    for case in table()
    for name, options in OPTIONS.items()
    if (case.name, case.layout) in (("samba", "tp2-pp2"), ("mamba-swa-mlp", "dp2"), ("mistral", "tp2-dp2"))
    if name != "overlapped" or case.layout == "dp2"
]


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "options"), CASES)
def test_gathered_weights_and_checkpoints_equal_one_process(
    case: Case, options: dict[str, bool], tmp_path: Path
) -> None:
    parallel = replace(case.config.parallel, **options)
    config = replace(case.config, parallel=parallel)
    several = tmp_path / "several"
    folder_of_one = tmp_path / "one"
    first, *others = run_distributed(state_after, case.world_size, config, several)
    alone = replace(case.config, parallel=ParallelConfig(distributed_optimizer=False))
    (expected,) = run_distributed(state_after, 1, alone, folder_of_one)
    assert others == [{}] * len(others)
    assert {name.partition(".")[0] for name in stored(several)} >= {"layers", "exp_avg", "exp_avg_sq"}
    for actual, wanted in ((first, expected), (stored(several), stored(folder_of_one))):
        assert actual.keys() == wanted.keys()
        for name, tensor in wanted.items():
            difference = (actual[name] - tensor).norm()
            assert difference <= 1e-5 * tensor.norm() + 1e-9, f"{name} is off by {difference / tensor.norm():.1e}"
    moments = [tensor.flatten() for name, tensor in stored(several).items() if name.startswith("exp_avg.")]
    assert torch.cat(moments).norm() > 0
