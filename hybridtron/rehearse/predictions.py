"""Predict the times of the GPU queue's training steps, and write them to a file before they are measured.

    python -m hybridtron.rehearse.predictions benchmarks/predictions/2026-11-27.json --gpu h100 --recipe mamba2_1.3b

The GPU queue (`proving/gpu/queue`) measures whole steps. This command rehearses the same steps, and writes their
modelled times, with the date and the commit. Nothing in the file is measured. A file that exists is not overwritten: a
prediction that could be changed after the measurement would not test the model.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.planning.rates import GPUS
from hybridtron.problems import Unusable
from hybridtron.proving.gpu.queue.parts import RECIPES
from hybridtron.rehearse.rehearsal import RehearsalProcess
from hybridtron.train.jsonl import write_whole

if TYPE_CHECKING:
    from hybridtron.rehearse.rehearsal import Rehearsed

NOTE = "Modelled by a rehearsal, not measured."


def main(arguments: list[str] | None = None) -> int:
    """Rehearse the chosen recipes' steps, and write the file. Return the exit code."""
    parser = argparse.ArgumentParser(description="Predict steps of the GPU queue before they are measured.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS))
    parser.add_argument("--recipe", action="append", required=True, choices=list(RECIPES), help="may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, to try this command")
    chosen = parser.parse_args(arguments)
    if chosen.file.exists():
        raise Unusable(f"{chosen.file} exists, and predictions are not overwritten; choose another file", code="exists")
    process = RehearsalProcess(GPUS[chosen.gpu], packages=())
    predicted = predictions(process, chosen.recipe, chosen.tiny)
    chosen.file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(chosen.file, json.dumps(predicted, indent=1) + "\n")
    return 0


def predictions(process: RehearsalProcess, recipes: list[str], tiny: bool) -> dict[str, Any]:
    """Return the file's content: the predicted steps, and what they depend on."""
    from hybridtron.config.resolve import RunPlan
    from hybridtron.ops.kernel_compiled import compiler_key  # imports torch, which must come after RehearsalProcess
    from hybridtron.proving.gpu.queue.whole_step import settings
    from hybridtron.proving.gpu.recipes import commit
    from hybridtron.proving.steps import load_checked

    steps = {}
    for recipe in recipes:
        texts = settings(recipe, tiny=tiny)
        steps[recipe] = {
            "settings": texts,
            **prediction(process.rehearse(RunPlan.of(load_checked(texts)).phases[0], 1, 0)),
        }
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {
        "about": NOTE,
        "date": today,
        "commit": commit(),
        "gpu": process.gpu.name,
        "compiler": compiler_key(),
        "steps": steps,
    }


def prediction(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return a step's modelled times in milliseconds, and each kernel's modelled time in microseconds."""
    whole = rehearsed.time.whole
    return {
        "step_ms": 1e3 * rehearsed.time.seconds,
        "device_ms": 1e3 * whole.device,
        "host_ms": 1e3 * whole.host,
        "bound": whole.bound,
        "tokens_per_second": rehearsed.tokens_per_second,
        "launches": whole.launches,
        "kernels": [
            {
                "name": kernel.name,
                "grid": list(kernel.grid),
                "launches": kernel.launches,
                "us": 1e6 * kernel.time.seconds,
                "bound": kernel.time.bound,
            }
            for kernel in rehearsed.kernels
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
