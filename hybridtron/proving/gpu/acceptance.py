"""Acceptance check of a GPU in twenty minutes: `make gpu-day-one`.

    python -m hybridtron.proving.gpu.acceptance build/gpu_day_one

Each step in the check is a command with its own time limit. The main steps, in this order:

1. compare every op's implementations with the reference
2. run the tests that need a GPU
3. train a run, resume a copy of it from a checkpoint, and compare the weights
4. take training steps with every recipe
5. measure the speed of kernels, and FP8
6. on several GPUs: audit layouts over NCCL, for another half hour at most

The folder gets each step's output and a table with exit codes. Results that belong to verification cards are written to
benchmarks/cards/measured; a card is a page with a recipe's measured and modelled results. If a step fails, the
following steps still run.

Exit codes: 0 all steps succeeded, 1 a step failed or took too long, 2 no folder is given.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.device import visible_gpus
from hybridtron.resources import pages

LEARNS = ("recipe=laptop", "precision=bf16", "run.deterministic=true", "run.sample_tokens=0")
TESTS = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "8")
HYBRIDTRON = (sys.executable, "-m", "hybridtron")
NO_PROGRAM = 127  # exit code of shells for a command that can't be started
Launch = Callable[[Sequence[str], Path, float], int]
"""Function that runs a command and returns its exit code. Its parameters: command, log file, time limit in seconds."""


@dataclass(frozen=True)
class AcceptanceStep:
    """A step in the check: a command and its time limit in seconds."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def steps(folder: Path, gpus: int = 1) -> list[AcceptanceStep]:
    """Return the steps in order. With several GPUs, the last step is the layout audit."""

    def check(part: str, limit_s: float) -> AcceptanceStep:
        output = str(folder / f"{part}.md")
        return AcceptanceStep(part, (*HYBRIDTRON, "check", "gpu", "--only", part, "--output", output), limit_s)

    def trained(name: str, limit_s: float) -> AcceptanceStep:
        return AcceptanceStep(name, (*HYBRIDTRON, "train", *LEARNS, f"run.dir={folder / name}"), limit_s)

    compared = (*HYBRIDTRON, "checkpoint", "diff", str(folder / "whole"), str(folder / "resumed"))
    return [
        AcceptanceStep("doctor", (*HYBRIDTRON, "doctor"), 60),
        check("correctness", 180),
        AcceptanceStep("tests", (*TESTS, "tests/test_gpu.py", "tests/ops"), 200),
        trained("whole", 90),
        trained("resumed", 60),
        AcceptanceStep("the same weights", compared, 20),
        check("every_recipe", 310),
        check("kernels", 120),
        check("fp8", 150),
        AcceptanceStep("cards", (*HYBRIDTRON, "check", "cards"), 10),
        *([AcceptanceStep("layouts", (*HYBRIDTRON, "audit", "--cases", "all", "--gpus"), 1800)] if gpus > 1 else []),
    ]


def run_command(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command with its output in the file `log`, and return the command's exit code.

    If the command took too long, the exit code is 124, like that of the program `timeout`. If the command can't be
    started, the exit code is NO_PROGRAM.
    """
    with log.open("w") as file:
        try:
            process = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
            return process.returncode
        except subprocess.TimeoutExpired:
            return 124
        except OSError:
            return NO_PROGRAM


def run_acceptance(folder: Path, cards: Path | None, launch: Launch = run_command) -> int:
    """Run all steps, and write the table with exit codes. Return 1 if a step failed, else 0.

    `cards` is the folder with verification cards, or None outside a checkout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    codes = dict[str, int]()
    for step in steps(folder, len(visible_gpus())):
        if step.name == "resumed":
            copy_interrupted(folder / "whole", folder / "resumed")
        start = time.monotonic()
        code = codes[step.name] = launch(step.command, folder / f"{step.name.replace(' ', '_')}.log", step.limit_s)
        cells.append(f"| {step.name} | {code} | {time.monotonic() - start:.0f} of {step.limit_s:.0f} |")
        print(f"{step.name}: exit code {code}", flush=True)
        if step.name == "the same weights" and cards is not None:
            note_resumed(cards, codes)
    table = ["# Day one", "", "| step | exit code | seconds |", "|---|---|---|", *cells]
    (folder / "day_one.md").write_text("\n".join(table) + "\n")
    print(folder / "day_one.md")
    return 1 if any(codes.values()) else 0


def copy_interrupted(whole: Path, resumed: Path) -> None:
    """Copy a run's folder without the last checkpoint, as if the run had been interrupted before its end."""
    if resumed.exists():
        shutil.rmtree(resumed)
    if not whole.is_dir():
        return
    shutil.copytree(whole, resumed, symlinks=True)
    checkpoints = sorted((resumed / "checkpoints").glob("step-*"))
    if len(checkpoints) > 1:
        shutil.rmtree(checkpoints[-1])


def note_resumed(cards: Path, codes: dict[str, int]) -> None:
    """Record for the verification card of `laptop` how far a resumed run's weights differ from an uninterrupted run's.

    `codes` has exit codes by step. The recorded difference is 0 if both runs and the comparison of their weights
    succeeded. If any of these three steps failed, the recorded difference is None (not measured).
    """
    path = cards / "measured" / "laptop.json"
    card = json.loads(path.read_text()) if path.exists() else {}
    names = ("whole", "resumed", "the same weights")
    if not any(codes[name] for name in names):
        card["resume_difference"] = 0.0
    else:
        card["resume_difference"] = None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m hybridtron.proving.gpu.acceptance FOLDER", file=sys.stderr)
        raise SystemExit(2)
    checkout = pages()
    raise SystemExit(run_acceptance(Path(sys.argv[1]), checkout and checkout / "cards"))
