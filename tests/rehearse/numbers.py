"""Rehearses steps with and without numbers that are added up with the gradient norm: JSON of waits, calls and copies.

`python -m tests.rehearse.numbers`
"""

from __future__ import annotations

import json
from typing import Any

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

process = RehearsalProcess(GPUS["h100"])

from hybridtron.engine.engine import Engine  # noqa: E402

step = Engine.step


def counted(numbers: int) -> dict[str, Any]:
    """Return what the update of a step with this many numbers waits for, sends, and copies from the host."""
    Engine.step = lambda self, lr: step(self, lr, None, [1.0] * numbers)  # type: ignore[method-assign]
    phase = RunPlan.of(load(["recipe=laptop", "precision=bf16", "phases.0.micro_batch=2", "parallel=data"])).phases[0]
    update = process.rehearse(phase, 2, 0, compiles=False).step.update
    return {"waits": len(update.waits), "calls": len(update.sent), "copies": len(update.copies)}


print(json.dumps({str(numbers): counted(numbers) for numbers in (0, 29)}))
