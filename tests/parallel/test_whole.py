"""Weights and optimizer state, gathered from a layout after some steps, are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tools.audit_cases import Case, table
from tools.audit_run import micro_batches

STEPS = 3


def state_after(seat: Seat, config: Config) -> dict[str, Tensor]:
    """What a checkpoint would hold, as the first process sees it; nothing on the others."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(config, groups)
        batches = micro_batches(config)
        own = len(batches) // groups.data_size
        for _ in range(STEPS):
            engine.forward_backward(batches[groups.data_rank * own :][:own])
            engine.optimizer.step(1e-2)
        held = {f"weight.{name}": weight.clone() for name, weight in engine.weights()}
        return held | dict(engine.optimizer.state())


CASES = [
    pytest.param(case, distributed, id=f"{case.layout}-{'distributed' if distributed else 'plain'}")
    for case in table()
    for distributed in (True, False)
    if (case.name, case.layout) in (("samba", "tp2-pp2"), ("mamba-swa-mlp", "dp2"), ("mistral", "tp2-dp2"))
]


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "distributed"), CASES)
def test_gathered_state_is_that_of_one_process(case: Case, distributed: bool) -> None:
    parallel = replace(case.config.parallel, distributed_optimizer=distributed)
    first, *others = run_distributed(state_after, case.world_size, replace(case.config, parallel=parallel))
    alone = replace(case.config, parallel=ParallelConfig(distributed_optimizer=False))
    (expected,) = run_distributed(state_after, 1, alone)
    assert others == [{}] * len(others)
    assert first.keys() == expected.keys()
    assert {name.partition(".")[0] for name in first} >= {"weight", "exp_avg", "exp_avg_sq"}
    for name, tensor in expected.items():
        difference = (first[name] - tensor).norm()
        assert difference <= 1e-5 * tensor.norm() + 1e-9, f"{name} is off by {difference / tensor.norm():.1e}"
    assert torch.cat([t.flatten() for n, t in first.items() if n.startswith("exp_avg.")]).norm() > 0
