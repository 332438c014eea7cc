"""Rehearse the GPU queue's parts, and compile all kernels that they launch.

    TRITON_CACHE_DIR=FOLDER python -m hybridtron.rehearse.queue_model FILE --gpu h100

The GPU queue (`proving/gpu/queue`) is a list of measurements for a GPU machine. Its parts time training steps and calls
to single ops. This command rehearses them: it simulates the steps and calls without a GPU, and writes their modelled
times to FILE, as JSON.

The command also compiles the Triton kernels for the kind of GPU in --gpu, and stores them in the Triton cache FOLDER.
Copy FOLDER to the GPU machine, which then need not compile the kernels. For this, both machines must have equal
versions of Triton, ptxas, Python and the kernels' sources (`ops/kernel_compiled.compiler_key`).
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
    """Rehearse the queue, and write the results to the file. Return the exit code."""
    parser = argparse.ArgumentParser(description="Rehearse the GPU queue, and compile its kernels.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS))
    parser.add_argument(
        "--recipe", action="append", choices=list(RECIPES), help="only this recipe's step; may be repeated"
    )
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, to try this command")
    chosen = parser.parse_args(arguments)
    process = RehearsalProcess(GPUS[chosen.gpu], packages=())
    rehearsals = rehearse_parts(process, chosen.recipe or list(RECIPES), chosen.tiny)
    chosen.file.write_text(json.dumps(rehearsals, indent=1) + "\n", encoding="utf-8")
    return 0


def rehearse_parts(process: RehearsalProcess, recipes: Sequence[str], tiny: bool = False) -> dict[str, Any]:
    """Return the modelled times for the queue's steps and op calls, with the GPU, the compiler and the commit.

    For each call, the memory traffic in GB is returned too. With `tiny`, steps have tiny sizes, and no calls are
    rehearsed.
    """
    from hybridtron.ops.kernel_compiled import compiler_key  # imports torch, which must come after RehearsalProcess
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
    """Return the modelled device time of a recipe's step, and the step's kernels.

    The queue also times steps with fewer sequences or tokens. These steps are rehearsed only to compile their kernels.
    """
    from hybridtron.config.resolve import RunPlan
    from hybridtron.proving.gpu.queue.whole_step import FEW, SHARES, settings, shrunk
    from hybridtron.proving.steps import load_checked
    from hybridtron.rehearse.report import as_json

    config = load_checked(settings(recipe, tiny=tiny))
    for smaller in (*(shrunk(config, rows=share) for share in SHARES[1:]), shrunk(config, tokens=FEW)):
        process.rehearse(RunPlan.of(smaller).phases[0], 1, 0)
    whole = process.rehearse(RunPlan.of(config).phases[0], 1, 0)
    return {"device_ms": 1e3 * whole.time.whole.device, "kernels": as_json(whole)["kernels"]}


if __name__ == "__main__":
    raise SystemExit(main())
