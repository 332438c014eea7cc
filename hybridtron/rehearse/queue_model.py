"""Rehearse the GPU queue's parts, and compile all kernels that they launch.

    TRITON_CACHE_DIR=FOLDER python -m hybridtron.rehearse.queue_model FILE --gpu h100

With a copy of this Triton cache, a machine with the same Triton, ptxas, Python and kernel sources does not compile them
again (`ops/kernel_compiled.compiler_key`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtron.planning.rates import GPUS
from hybridtron.proving.gpu.queue.parts import RECIPES
from hybridtron.rehearse.rehearsal import RehearsalProcess


def main(arguments: list[str] | None = None) -> int:
    """Rehearse the queue and write the file. Returns the exit code."""
    parser = argparse.ArgumentParser(description="a rehearsal of the GPU queue, and its kernels compiled")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS))
    parser.add_argument("--recipe", action="append", choices=list(RECIPES), help="these alone; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try this tool")
    chosen = parser.parse_args(arguments)
    process = RehearsalProcess(GPUS[chosen.gpu], packages=())
    rehearsals = rehearsed(process, chosen.recipe or list(RECIPES), chosen.tiny)
    chosen.file.write_text(json.dumps(rehearsals, indent=1) + "\n", encoding="utf-8")
    return 0


def rehearsed(process: RehearsalProcess, recipes: Sequence[str], tiny: bool = False) -> dict[str, Any]:
    """Return the modelled steps and calls, as the queue's parts make them, with the versions used."""
    from hybridtron.ops.kernel_compiled import compiler_key  # modules that import torch wait for the guard
    from hybridtron.proving.gpu.queue import contests, norms
    from hybridtron.proving.gpu.recipes import commit

    steps = {recipe: step(process, recipe, tiny) for recipe in recipes}
    if tiny:
        work_of_calls = {}
    else:
        work_of_calls = process.calls(contests.calls) | process.calls(norms.calls)
    calls = {key: {"ms": 1e3 * work.seconds, "gb": work.bytes / 1e9} for key, work in work_of_calls.items()}
    return {"gpu": process.gpu.name, "compiler": compiler_key(), "commit": commit(), "steps": steps, "calls": calls}


def step(process: RehearsalProcess, recipe: str, tiny: bool) -> dict[str, Any]:
    """Return the model of a recipe's step. Smaller steps are rehearsed too, only to compile their kernels."""
    from hybridtron.config.resolve import resolve
    from hybridtron.proving.gpu.queue.whole_step import FEW, SHARES, settings, shrunk
    from hybridtron.proving.steps import checked
    from hybridtron.rehearse.report import as_json

    config = checked(settings(recipe, tiny=tiny))
    for smaller in (*(shrunk(config, rows=share) for share in SHARES[1:]), shrunk(config, tokens=FEW)):
        process.rehearse(resolve(smaller)[0], 1, 0)
    whole = process.rehearse(resolve(config)[0], 1, 0)
    return {"device_ms": 1e3 * whole.time.whole.device, "kernels": as_json(whole)["kernels"]}


if __name__ == "__main__":
    raise SystemExit(main())
