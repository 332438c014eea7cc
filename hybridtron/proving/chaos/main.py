"""Checks that a run under random faults ends with exactly the parameters of an undisturbed run, on your machine.

    hybridtron chaos                                    in a checkout also: make chaos
    hybridtron chaos --layout tp2 --seed 7 --steps 400

It trains a tiny model on two processes, which read through data workers and save every few steps: once undisturbed, and
once under faults. Ranks and workers are killed and stopped, the run is signalled to stop, checkpoint files get flipped
bits, are truncated and deleted, and the disk fills up. Each time the run ends it is started again, as a cluster would
requeue it. A third run has its torchrun killed and restarted at once, and in the end is started twice at the same time.
Finally weights, optimizer, carried states and the losses of all steps must be equal bit for bit, and no fault may have
stalled the run for longer than twice run.timeout.

Faults come after a random number of steps, every kind once before any repeats. A full disk needs the right to mount:
root has it, and so does every user where the kernel allows user namespaces with mounts. Elsewhere this fault is left
out, and the report says so. Only this program and its runs see the mount, so that none is left behind.

Exit codes: 0 all equal, 1 not equal, 2 a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybridtron.limits import path_of
from hybridtron.proving.chaos import starts as chaos_starts
from hybridtron.proving.chaos.faults import Disk
from hybridtron.proving.chaos.ordeal import HEADER, Injected, Ordeal, OrdealFailed
from hybridtron.proving.chaos.run import LAYOUTS, SAVE_EVERY, TIMEOUT_S, Run, arguments_of, write_data
from hybridtron.shipped import PACKAGE

APART = "HYBRIDTRON_CHAOS_APART"  # set inside the program's own mount namespace
SAME = ("step", "tokens", "loss", "grad_norm", "validation")  # reproducible fields of a metrics line


def unequal(clean: Run, chaos: Run) -> list[str]:
    """List the differences between both finished runs: losses, and all contents of the final checkpoint."""
    from hybridtron.checkpoint import folder as folders
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.checkpoint.rewrite import differences

    ours, theirs = (
        [{key: json.loads(line).get(key) for key in SAME} for line in run.lines()] for run in (clean, chaos)
    )
    lines = [
        f"step {a['step']}: {a} undisturbed, {b} under faults" for a, b in zip(ours, theirs, strict=False) if a != b
    ]
    if not len(ours) == len(theirs) == clean.steps:
        lines.append(f"{len(ours)} steps have metrics undisturbed, {len(theirs)} under faults, of {clean.steps}")
    try:
        left, right = (Checkpoint.open(folders.folder_of(run.folder, run.steps)) for run in (clean, chaos))
        lines += [
            f"{difference.what}: {difference.left} undisturbed, {difference.right} under faults"
            for difference in differences(left, right)
        ]
    except BrokenCheckpoint as error:
        lines.append(str(error))
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="hybridtron chaos", description="A run under random faults ends as one without."
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--mean", type=float, default=20, metavar="N", help="steps between faults (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the faults; the moment within a step is chance all the same")
    parser.add_argument("--layout", choices=LAYOUTS, default="dp2", help="of the two processes (%(default)s)")
    parser.add_argument("--keep-folder", action="store_true", help="keep the runs also where all is well")
    parser.add_argument("--page", type=path_of, metavar="FILE", help="write the table there, in Markdown")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1 or chosen.mean < 1:
        parser.error(f"--steps {chosen.steps} and --mean {chosen.mean:g} must be at least 1")
    return chosen


def main(arguments: list[str]) -> int:
    """Train undisturbed and under faults, and compare. Returns the exit code."""
    chosen = parse(arguments)
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(10**6)
    home = Path("runs/chaos").absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{chosen.seed}"
    request = f"{chosen.steps} steps on {chosen.layout}, --seed {chosen.seed}"
    print(f"{request}, a fault every {chosen.mean:g} steps or so; runs: {home}", flush=True)
    write_data(home / "data")
    began = time.monotonic()
    ordeal, wrong = compared(chosen, home)
    summary = [
        f"{len(ordeal.faults)} faults, {ordeal.starts} starts; then {chaos_starts.KILLS} kills of torchrun",
        f"goodput: {chosen.steps / max(ordeal.done, chosen.steps):.0%}, of {ordeal.done} steps done, lost ones too",
        *([f"a full disk was left out: {ordeal.disk.why_not}"] if ordeal.disk.why_not else []),
        "NOT THE SAME" if wrong else "weights, optimizer, states and the losses of all steps: the same, bit for bit",
    ]
    report(chosen, ordeal.faults, [*summary, *wrong])
    print(f"{time.monotonic() - began:.0f} s, all runs")
    if wrong or chosen.keep_folder:
        print(f"runs and logs: {home}")
    else:
        shutil.rmtree(home)
    return 1 if wrong else 0


def compared(chosen: argparse.Namespace, home: Path) -> tuple[Ordeal, list[str]]:
    """Train all three runs, and return the record of faults and all differences from the undisturbed run."""
    runs = []
    for name in ("peace", "chaos", "starts"):
        runs.append(Run(home / name, arguments_of(home / "data", chosen.steps, chosen.layout), chosen.steps))
        runs[-1].home.mkdir()
    clean, chaos, starts = runs
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with Disk(chaos) as disk, bar as progress:
        ordeal = Ordeal(chaos, chosen.mean, random.Random(chosen.seed), disk)
        try:
            Ordeal(clean, float("inf"), random.Random(), disk).survive(progress)
            ordeal.survive(progress)
        except OrdealFailed as error:
            return ordeal, [str(error)]
        wrong = unequal(clean, chaos)
    return ordeal, wrong or chaos_starts.survive(starts, random.Random(chosen.seed)) or unequal(clean, starts)


def report(chosen: argparse.Namespace, faults: list[Injected], summary: list[str]) -> None:
    """Print all faults with their outcome, and write the page if one is asked for."""
    from hybridtron.proving.measuring import BenchReport, publish

    options = f"--layout {chosen.layout} --steps {chosen.steps} --mean {chosen.mean:g} --seed {chosen.seed}"
    timeout = f"run.timeout is {TIMEOUT_S:g} s; a checkpoint every {SAVE_EVERY} steps, written asynchronously"
    page = BenchReport("Chaos", notes=[timeout, *summary])
    page.table("faults", HEADER, [fault.cells() for fault in faults])
    publish(page, f"hybridtron chaos {options}", chosen.page)


def apart(arguments: list[str]) -> None:
    """Restart this program in its own mount namespace, if the system allows one."""
    ways = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])
    for way in ways if APART not in os.environ and shutil.which("unshare") else ():
        if subprocess.run([*way, "true"], capture_output=True, check=False).returncode == 0:
            variables = {APART: "1", "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}
            command = [*way, sys.executable, "-P", "-m", "hybridtron", "chaos", *arguments]
            os.execvpe(way[0], command, os.environ | variables)


def stopped(number: int, _: object) -> NoReturn:
    """Exit on a signal, so that processes and mounts are cleaned up."""
    raise SystemExit(128 + number)


def program(arguments: list[str]) -> int:
    """Run `main` in its own mount namespace, with clean exits on signals."""
    warnings.simplefilter("ignore")
    if not {"-h", "--help"} & set(arguments):
        apart(arguments)
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    return main(arguments)
