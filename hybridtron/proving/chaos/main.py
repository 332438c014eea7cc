"""Checks that a run under random faults ends with exactly the parameters of an undisturbed run, on your machine.

    hybridtron chaos
    hybridtron chaos --layout tp2 --seed 7 --steps 400
    hybridtron chaos --layout ep2 --steps 30 --mean 6

The program trains a tiny model three times. Each run has two processes with data workers, and saves a checkpoint every
few steps. With --layout ep2 the model has experts, which the processes divide. The time depends on the number of starts
more than on the number of steps.

1. The first run is undisturbed.
2. The second run is restarted each time it ends, and gets these faults:
   - SIGKILL or SIGSTOP for a rank or a data worker, SIGTERM for a rank
   - a flipped bit in a checkpoint file, a truncated or deleted checkpoint file
   - a full disk
3. The third run is started by torchrun. Several times torchrun is killed and restarted immediately. In the end two
   torchruns start the run at the same time.

All three runs must end with weights, optimizer states and recurrent states that are equal bit for bit. The losses of
all steps must be equal too. No fault may stall a run for longer than twice run.timeout.

With --ordeals the program instead trains supervised runs (`run.restarts`), each with one fault, and compares each with
an undisturbed run of its layout. The faults take turns: a rank is killed, hangs in a step or in a checkpoint, or is
slow; a bit of a rank's moments is flipped (`run.verify_state`); a node is lost, also with a broken copy of its local
checkpoint; a local disk is full. Each run must continue inside its launch, and notice its fault within a limit. Each
fault becomes a line of --record. An interrupted program continues after the last line, if the code's commit and torch
are the same and no file of the code was changed since the commit. --faults 8 tries each kind once, and all 64 take an
hour or two. Leave the machine idle meanwhile: processes that wait for a core for many seconds break the limits.

Faults are injected after random numbers of steps. Every kind of fault is injected once before any kind repeats. The
--seed determines the order of faults and the numbers of steps, but not the moment within a step.

To fill the disk, the program mounts a small file system. Mounting needs root, or a kernel that allows mounts in user
namespaces. If mounting fails, this fault is skipped, and so are lost nodes; the report says so. Only this program and
its runs see the mount, which disappears when they end.

Exit codes: 0 all runs are equal, 1 they are not equal or a run failed, 2 a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybridtron.limits import path_of
from hybridtron.problems import CommandParser
from hybridtron.proving.chaos import campaign
from hybridtron.proving.chaos import starts as chaos_starts
from hybridtron.proving.chaos.fault_run import HEADER, FaultRun, FaultRunFailed, Injected
from hybridtron.proving.chaos.faults import Disk, unshare_mounts
from hybridtron.proving.chaos.training_run import (
    FAULT_EVERY,
    LAYOUTS,
    SAVE_EVERY,
    TIMEOUT_S,
    Run,
    arguments_of,
    write_data,
)
from hybridtron.resources import PACKAGE
from hybridtron.train.time_log import TimeSpent, read_time

APART = "HYBRIDTRON_CHAOS_APART"  # environment variable, set once the program is in its own mount namespace
SAME = ("step", "tokens", "loss", "grad_norm", "validation")  # fields of a metrics line that do not depend on time


def unequal(clean: Run, chaos: Run) -> list[str]:
    """Return descriptions of all differences between two finished runs, in metrics and in the final checkpoints."""
    from hybridtron.checkpoint import folder as folders
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.checkpoint.rewrite import differences

    clean_metrics, chaos_metrics = (
        [{key: json.loads(line).get(key) for key in SAME} for line in run.lines()] for run in (clean, chaos)
    )
    lines = [
        f"step {a['step']}: {a} in the undisturbed run, {b} in the other run"
        for a, b in zip(clean_metrics, chaos_metrics, strict=False)
        if a != b
    ]
    if not len(clean_metrics) == len(chaos_metrics) == clean.steps:
        lines.append(
            f"the undisturbed run has metrics of {len(clean_metrics)} steps, the other run of {len(chaos_metrics)} "
            f"steps; both should have {clean.steps}"
        )
    try:
        clean_checkpoint, chaos_checkpoint = (
            Checkpoint.open(folders.folder_of(run.folder, run.steps)) for run in (clean, chaos)
        )
        lines += [
            f"{difference.what}: {difference.left} in the undisturbed run, {difference.right} in the other run"
            for difference in differences(clean_checkpoint, chaos_checkpoint)
        ]
    except BrokenCheckpoint as error:
        lines.append(str(error))
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. A wrong value ends the process with exit code 2."""
    parser = CommandParser(
        prog="hybridtron chaos", description="Check that a run under random faults ends like an undisturbed run."
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--mean", type=float, default=FAULT_EVERY, metavar="N", help="steps between faults (%(default)s)"
    )
    parser.add_argument("--seed", type=int, help="seed of the faults' order and steps, not of moments within a step")
    parser.add_argument("--layout", choices=LAYOUTS, default="dp2", help="layout of the two processes (%(default)s)")
    parser.add_argument("--ordeals", action="store_true", help="faults of supervised runs, inside one launch each")
    parser.add_argument("--faults", type=int, metavar="N", help="number of ordeals in the record (default: 64)")
    parser.add_argument("--record", type=path_of, metavar="FILE", help="record of ordeals, with a line for each fault")
    parser.add_argument("--keep-folder", action="store_true", help="keep the run folders even if all runs are equal")
    parser.add_argument("--page", type=path_of, metavar="FILE", help="write the report to FILE, in Markdown")
    chosen = parser.parse_args(arguments)
    if not chosen.ordeals and (chosen.faults is not None or chosen.record is not None):
        parser.refuse("--ordeals", "missing", "--faults and --record belong to --ordeals: add --ordeals")
    if chosen.faults is not None and chosen.faults < 1:
        parser.refuse("--faults", "out-of-range", f"--faults {chosen.faults} must be at least 1")
    if chosen.faults is not None and chosen.faults > campaign.MOST_FAULTS:
        why = f"--faults {chosen.faults} must be at most {campaign.MOST_FAULTS}: later faults come after a run's end"
        parser.refuse("--faults", "out-of-range", why)
    if chosen.steps < 1 or chosen.mean < 1:
        parser.refuse(
            "--steps", "out-of-range", f"--steps {chosen.steps} and --mean {chosen.mean:g} must both be at least 1"
        )
    return chosen


def main(arguments: list[str]) -> int:
    """Train all runs, compare their results, and print a report. Return the exit code."""
    chosen = parse(arguments)
    if chosen.ordeals:
        return pass_ordeals(chosen)
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(10**6)
    home = Path("runs/chaos").absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{chosen.seed}"
    request = f"{chosen.steps} steps on {chosen.layout}, --seed {chosen.seed}"
    print(f"{request}, a fault every {chosen.mean:g} steps on average; run folders: {home}", flush=True)
    write_data(home / "data")
    began = time.monotonic()
    fault_run, result = compare_runs(chosen, home)
    spent = read_time(fault_run.run.folder)
    summary = [
        f"{len(fault_run.faults)} faults, {fault_run.starts} starts; then {chaos_starts.KILLS} kills of torchrun",
        *([f"time of the run under faults: {spent.words()}"] if spent is not None else []),
        words_of_kept_steps(chosen.steps, fault_run.done, spent),
        *(
            [f"the full disk was skipped, because mounting failed: {fault_run.disk.why_not}"]
            if fault_run.disk.why_not
            else []
        ),
        result.verdict,
    ]
    wrong = [*result.failures, *result.differences]
    report(chosen, fault_run.faults, [*summary, *wrong])
    print(f"all runs took {time.monotonic() - began:.0f} s")
    return close(home, wrong, chosen.keep_folder)


def pass_ordeals(chosen: argparse.Namespace) -> int:
    """Pass the ordeals that the record lacks, and print a report of the record. Return the exit code."""
    home = Path("runs/ordeals").absolute()
    record = chosen.record or home / "record.jsonl"
    count = chosen.faults or campaign.MOST_FAULTS
    try:
        result = campaign.Campaign(home, record, unequal).carry_on(count, lambda line: print(line, flush=True))
    except campaign.CampaignFailed as error:
        print(error)
        return 1
    campaign.write_page(result, count, chosen.page)
    return int(any(each.wrong for each in result.passed))


def words_of_kept_steps(steps: int, trained: int, spent: TimeSpent | None) -> str:
    """Return the report's line about the steps, and the time, that no fault has cost.

    trained: number of steps with a metrics line in any start, including steps that were trained again
    """
    words = f"{steps / max(trained, steps):.0%} of {trained} trained steps stayed, and the others were trained again"
    if spent is None:
        return words
    share = spent.seconds.get("steps", 0.0) / max(spent.total, 1e-9)
    return f"{words}; the steps that stayed took {share:.0%} of the time"


def close(home: Path, wrong: Sequence[str], keeps_folder: bool) -> int:
    """Remove the run folders, or print where they are if something was wrong. Return the exit code."""
    if wrong or keeps_folder:
        print(f"run folders and logs: {home}")
    else:
        shutil.rmtree(home)
    return 1 if wrong else 0


@dataclass(frozen=True)
class ChaosResult:
    """The result of all runs.

    failures: descriptions of the runs that failed
    differences: descriptions of the differences between finished runs
    """

    failures: Sequence[str] = ()
    differences: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """The report's line about the result."""
        if self.failures:
            return "A RUN FAILED, so the results were not all compared"
        if self.differences:
            return "NOT THE SAME"
        return "weights, optimizer, states and the losses of all steps are equal bit for bit"


def compare_runs(chosen: argparse.Namespace, home: Path) -> tuple[FaultRun, ChaosResult]:
    """Train undisturbed, under faults and by torchrun. Return the run under faults, and the result of all runs.

    The run by torchrun is skipped if the run under faults differs from the undisturbed run, or if one of these two
    runs fails.
    """
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
        fault_run = FaultRun(chaos, chosen.mean, random.Random(chosen.seed), disk)
        try:
            FaultRun(clean, float("inf"), random.Random(), disk).survive(progress)
            fault_run.survive(progress)
        except FaultRunFailed as error:
            return fault_run, ChaosResult(failures=[str(error)])
        differences = unequal(clean, chaos)
    if differences:
        return fault_run, ChaosResult(differences=differences)
    if failures := chaos_starts.survive(starts, random.Random(chosen.seed)):
        return fault_run, ChaosResult(failures=failures)
    return fault_run, ChaosResult(differences=unequal(clean, starts))


def report(chosen: argparse.Namespace, faults: list[Injected], summary: list[str]) -> None:
    """Print all faults with their outcomes, and write the report to the file of `--page` if one is given."""
    from hybridtron.proving.measuring import BenchReport, publish

    options = f"--layout {chosen.layout} --steps {chosen.steps} --mean {chosen.mean:g} --seed {chosen.seed}"
    timeout = f"run.timeout is {TIMEOUT_S:g} s; a checkpoint every {SAVE_EVERY} steps, written asynchronously"
    page = BenchReport("Chaos", notes=[timeout, *summary])
    page.table("faults", HEADER, [fault.cells() for fault in faults])
    publish(page, f"hybridtron chaos {options}", chosen.page)


def apart(arguments: list[str]) -> None:
    """Replace this process by the same program in a mount namespace of its own.

    Return only if the system allows no such namespace, or if this process is already in such a namespace.
    """
    unshare = [] if APART in os.environ else unshare_mounts()
    if unshare:
        variables = {APART: "1", "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}
        command = [*unshare, sys.executable, "-P", "-m", "hybridtron", "chaos", *arguments]
        os.execvpe(unshare[0], command, os.environ | variables)


def exit_on_signal(number: int, _: object) -> NoReturn:
    """Raise SystemExit on a signal, so that processes and mounts are cleaned up."""
    raise SystemExit(128 + number)


def program(arguments: list[str]) -> int:
    """Run `main` in a mount namespace of its own, and clean up on SIGTERM and SIGINT. Return the exit code."""
    warnings.simplefilter("ignore")
    if not {"-h", "--help"} & set(arguments):
        apart(arguments)
    signal.signal(signal.SIGTERM, exit_on_signal)
    signal.signal(signal.SIGINT, exit_on_signal)
    return main(arguments)
