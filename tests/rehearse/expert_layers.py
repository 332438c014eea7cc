"""Rehearses models that differ by one layer of experts: its launches, and the bytes of its copies of rows.

`python -m tests.rehearse.expert_layers JOBS` with a JSON list of [settings, gpus]. Each model is rehearsed with the
pattern WE and with WEE, and the difference is printed: {"forward": {"launches": n, "copied": {kernel: bytes}}, ...}.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

PATTERNS = ("WE", "WEE")
PARTS = ("forward", "backward")
MOVES = ("experts.copy", "experts.add", "experts.spread")


def counted(process: RehearsalProcess, settings: list[str], gpus: int) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Return launches by part, and the bytes of kernels that copy or add rows by (part, kernel), in one micro-batch."""
    run_plan = RunPlan.of(load(settings))
    require(run_plan, gpus)
    step = process.rehearse(largest_phase(run_plan), gpus, 0, False).step
    assert step.micro_batches == 1
    launches: Counter[str] = Counter()
    copied: Counter[tuple[str, str]] = Counter()
    for operation in step.passes_of_many.operations:
        launches[operation.part] += 1
        if operation.name in MOVES:
            copied[operation.part, operation.name] += operation.bytes
    return launches, copied


if __name__ == "__main__":
    process = RehearsalProcess(GPUS["h200"])
    layers = []
    for settings, gpus in json.loads(sys.argv[1]):
        fewer, more = (counted(process, [*settings, f"model.pattern={pattern}"], gpus) for pattern in PATTERNS)
        layer: dict[str, Any] = {}
        for part in PARTS:
            copies = {name: size for (of_part, name), size in (more[1] - fewer[1]).items() if of_part == part}
            layer[part] = {"launches": more[0][part] - fewer[0][part], "copied": copies}
        layers.append(layer)
    print(json.dumps(layers))
