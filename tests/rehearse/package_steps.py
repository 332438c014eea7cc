"""Rehearses small recipes in one process, with all packages that have stubs installed: JSON of reports.

`python -m tests.rehearse.package_steps`; attention is by the first of its forms, and by version 4.
"""

from __future__ import annotations

import json

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.package_stubs import STUBS
from hybridtron.rehearse.rehearsal import RehearsalProcess

OURS = {"attention": "flash-attn", "causal_conv": "triton", "selective_scan": "triton", "ssd_scan": "triton"}
SAMBA = ("recipe=samba_421m", "precision=fp8_current", "phases.0.micro_batch=2")
JOBS: dict[str, tuple[list[str], dict[str, str]]] = {
    "laptop": (["recipe=laptop", "precision=bf16"], {}),
    "flash 4": (["recipe=laptop", "precision=bf16"], {"attention": "flash-attn-4"}),
    "isolated": (["recipe=laptop", "precision=bf16", "data.documents=isolate"], {"attention": "flash-attn-4"}),
    "mamba2": (["recipe=mamba2_laptop", "precision=bf16"], {}),
    "flash": (["recipe=gdn_laptop", "precision=bf16"], {"attention": "flash-attn"}),
    "torch's own": (["recipe=gdn_laptop", "precision=bf16"], {"attention": "sdpa"}),
    "fp8": (["recipe=laptop", "precision=fp8_delayed"], {}),
    **{
        f"planned {number}": (settings, OURS)
        for number, settings in enumerate(
            (
                [*SAMBA],
                [*SAMBA, "precision.cache_weights=true"],
                [*SAMBA, "precision.bf16_first=4", "precision.bf16_last=4"],
                ["recipe=mamba2_130m", "precision=fp8_current", "phases.0.micro_batch=4"],
            )
        )
    },
}

if __name__ == "__main__":
    process = RehearsalProcess(GPUS["h100"], list(STUBS))
    from hybridtron.ops.dispatch import force
    from hybridtron.rehearse.report import as_json

    reports = {}
    for name, (settings, forced) in JOBS.items():
        with force(**forced):
            reports[name] = as_json(process.rehearse(largest_phase(RunPlan.of(load(settings))), 1, 0, compiles=False))
    print(json.dumps(reports))
