"""Every rank comes to the same verdict, since it sees the same gradient norm, to the last bit."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import pytest

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Case, table
from tests.distributed import run_distributed
from tests.train.faults import spoiled

STEPS = 4
CASES = [
    pytest.param(
        case,
        distributed,
        id=f"{case.layout}-{optimizer}",
        marks=[pytest.mark.slow] * (distributed != (case.layout == "tp2-dp2")),
    )
    for case in table()
    for optimizer, distributed in (("distributed", True), ("plain", False))
    if (case.name, case.layout) in (("samba", "tp2-pp2"), ("mamba-swa-mlp", "dp2"), ("mistral", "tp2-dp2"))
]


def verdicts(seat: Seat, config: Config) -> list[tuple[float, bool, float | None]]:
    """Norm, verdict and limit of each step; the last rank's loss of the first micro-batch is no number."""
    with seat.groups(config.parallel) as groups, ExitStack() as stack:
        if seat.rank == seat.world_size - 1:
            stack.enter_context(spoiled(math.nan, [1]))
        engine = Engine(resolve(config)[0], groups)
        batches = micro_batches(resolve(config)[0])
        judged_steps = []
        count = len(batches) // groups.data.size
        for _ in range(STEPS):
            engine.forward_backward(batches[groups.data.rank * count :][:count])
            judged_steps.append((*engine.step(1e-2), engine.guard.limit))
        return judged_steps


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "distributed"), CASES)
def test_all_ranks_reach_the_same_verdicts(case: Case, distributed: bool) -> None:
    parallel = replace(case.config.parallel, distributed_optimizer=distributed)
    first, *others = run_distributed(verdicts, case.world_size, replace(case.config, parallel=parallel))
    assert [accepted for _, accepted, _ in first] == [False, *[True] * (STEPS - 1)]
    assert math.isnan(first[0][0])
    assert all(other[1:] == first[1:] and not other[0][1] for other in others)
