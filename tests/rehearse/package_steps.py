"""Rehearses small recipes where every package that can stand in counts as installed, in one process: JSON of reports.

`python -m tests.rehearse.package_steps`; attention is by the first of its forms, and by version 4.
"""

from __future__ import annotations

import json

from hybridtron.config.load import load
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess
from hybridtron.rehearse.stand_ins import WORKS

JOBS = {
    "laptop": (["recipe=laptop", "precision=bf16"], {}),
    "flash 4": (["recipe=laptop", "precision=bf16"], {"attention": "flash-attn-4"}),
    "isolated": (["recipe=laptop", "precision=bf16", "data.documents=isolate"], {"attention": "flash-attn-4"}),
    "mamba2": (["recipe=mamba2_laptop", "precision=bf16"], {}),
    "fp8": (["recipe=laptop", "precision=fp8_delayed"], {}),
}

if __name__ == "__main__":
    process = RehearsalProcess(GPUS["h100"], list(WORKS))
    from hybridtron.ops.dispatch import force
    from hybridtron.rehearse.report import as_json

    found = {}
    for name, (settings, forced) in JOBS.items():
        with force(**forced):
            found[name] = as_json(process.rehearse(largest_phase(load(settings)), 1, 0, compiles=False))
    print(json.dumps(found))
