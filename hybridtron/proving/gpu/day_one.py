"""Acceptance check of a GPU in twenty minutes: `make gpu-day-one`. Every step is a command with its own time limit.

    python -m hybridtron.proving.gpu.day_one build/gpu_day_one

First comes the correctness of every implementation, then the tests that need a GPU, a run that learns and one that
resumes, a step of every recipe that fits, the speed of kernels, and FP8. With several GPUs the layouts over NCCL need
another half hour at most. The folder gets the output of each step and a table of results; lines of the verification
cards are written next to the cards. A step that fails does not stop the others.

Exit codes: 0 all well, 1 a step failed or took too long, 2 no folder is given.
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
from hybridtron.shipped import pages

LEARNS = ("recipe=laptop", "precision=bf16", "run.deterministic=true", "run.sample_tokens=0")
TESTS = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "8")
HYBRIDTRON = (sys.executable, "-m", "hybridtron")
NO_PROGRAM = 127  # exit code for a command that can't be started
Launch = Callable[[Sequence[str], Path, float], int]


@dataclass(frozen=True)
class DayOneStep:
    """A command and its time limit."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def steps(folder: Path, gpus: int = 1) -> list[DayOneStep]:
    """Return the steps, the most important first; with several GPUs, layouts over NCCL come last."""

    def check(part: str, limit_s: float) -> DayOneStep:
        output = str(folder / f"{part}.md")
        return DayOneStep(part, (*HYBRIDTRON, "check", "gpu", "--only", part, "--output", output), limit_s)

    def trained(name: str, limit_s: float) -> DayOneStep:
        return DayOneStep(name, (*HYBRIDTRON, "train", *LEARNS, f"run.dir={folder / name}"), limit_s)

    compared = (*HYBRIDTRON, "checkpoint", "diff", str(folder / "whole"), str(folder / "resumed"))
    return [
        DayOneStep("doctor", (*HYBRIDTRON, "doctor"), 60),
        check("correctness", 180),
        DayOneStep("tests", (*TESTS, "tests/test_gpu.py", "tests/ops"), 200),
        trained("whole", 90),
        trained("resumed", 60),
        DayOneStep("the same weights", compared, 20),
        check("every_recipe", 310),
        check("kernels", 120),
        check("fp8", 150),
        DayOneStep("cards", (*HYBRIDTRON, "check", "cards"), 10),
        *([DayOneStep("layouts", (*HYBRIDTRON, "audit", "--cases", "all", "--gpus"), 1800)] if gpus > 1 else []),
    ]


def launched(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command with its output in a file. Returns its exit code, or that of `timeout` (124) if it took too
    long.
    """
    with log.open("w") as file:
        try:
            process = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
            return process.returncode
        except subprocess.TimeoutExpired:
            return 124
        except OSError:
            return NO_PROGRAM


def day_one(folder: Path, cards: Path | None, launch: Launch = launched) -> int:
    """Run all steps and write the table. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    codes = dict[str, int]()
    for step in steps(folder, len(visible_gpus())):
        if step.name == "resumed":
            interrupted(folder / "whole", folder / "resumed")
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


def interrupted(whole: Path, resumed: Path) -> None:
    """Copy a run without its last checkpoint, as if it had been interrupted."""
    if resumed.exists():
        shutil.rmtree(resumed)
    if not whole.is_dir():
        return
    shutil.copytree(whole, resumed, symlinks=True)
    checkpoints = sorted((resumed / "checkpoints").glob("step-*"))
    if len(checkpoints) > 1:
        shutil.rmtree(checkpoints[-1])


def note_resumed(cards: Path, codes: dict[str, int]) -> None:
    """Record in the recipe's card that the resumed run equals the uninterrupted one, or None if a step failed."""
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
        print("usage: python -m hybridtron.proving.gpu.day_one FOLDER", file=sys.stderr)
        raise SystemExit(2)
    checkout = pages()
    raise SystemExit(day_one(Path(sys.argv[1]), checkout and checkout / "cards"))
