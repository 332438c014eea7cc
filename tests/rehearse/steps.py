"""Rehearses the jobs in its argument, in one process: a JSON list of [settings, gpus, rank] in, a list of reports out.

A fourth entry says if kernels are compiled (default: yes), a fifth which phase is rehearsed (default: the largest), a
sixth the imbalance of experts' loads (default: none).
"""

from __future__ import annotations

import json
import sys

from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

if __name__ == "__main__":
    process = RehearsalProcess(GPUS["h200"])
    reports = []
    for settings, gpus, rank, *more in json.loads(sys.argv[1]):
        config = load(settings)
        require(RunPlan.of(config), gpus)
        phase = largest_phase(RunPlan.of(config))
        if len(more) > 1 and more[1] is not None:
            phase = resolve(config)[more[1]]
        rehearsed = process.rehearse(phase, gpus, rank, *more[:1], **dict(zip(["imbalance"], more[2:], strict=False)))
        from hybridtron.rehearse.report import as_json

        reports.append(as_json(rehearsed))
    print(json.dumps(reports))
