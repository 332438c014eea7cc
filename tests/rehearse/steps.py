"""Rehearses the jobs in its argument, in one process: a JSON list of [settings, gpus, rank] in, a list of reports out.

A fourth entry says if kernels are compiled (default: yes), a fifth which phase is rehearsed (default: the largest).
"""

from __future__ import annotations

import json
import sys

from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

if __name__ == "__main__":
    process = RehearsalProcess(GPUS["h200"])
    found = []
    for settings, gpus, rank, *more in json.loads(sys.argv[1]):
        config = load(settings)
        require(config, gpus)
        phase = resolve(config)[more[1]] if len(more) > 1 else largest_phase(config)
        rehearsed = process.rehearse(phase, gpus, rank, *more[:1])
        from hybridtron.rehearse.report import as_json

        found.append(as_json(rehearsed))
    print(json.dumps(found))
