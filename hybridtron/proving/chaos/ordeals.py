"""Ordeals of a supervised run: single faults, after which the run must continue inside the same launch.

    killed          SIGKILL for a rank
    hung in step    SIGSTOP for a rank, between two steps
    hung in save    SIGSTOP for a rank while it writes its part of a checkpoint
    lost node       SIGKILL for the supervisor of a rank, whose node a spare node replaces
    corrupt         a flipped bit in a moment of a rank, whose node a spare node replaces

The run has a supervisor for each of several nodes, as srun would start them: two with a rank each, and spares. Faults
come from a hook inside the rank, so that each comes at a certain point, and once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.proving.chaos.training_run import SAVE_EVERY, START_S, TRAIN, Run, arguments_of
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.faults import RankFault
from hybridtron.train.supervisor.supervisor import SPARES

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.engine.engine import Engine

ORDEALS = ("killed", "hung in step", "hung in save", "lost node", "corrupt")
VARIABLE = "HYBRIDTRON_ORDEALS"  # environment variable: ordeals and their steps, such as `killed=10,lost node=20`
RANKS = 2
RANK = 1  # the rank at fault
TIMEOUT_S = 60.0  # run.timeout; a tenth of it is the shortest limit of a section
LATE_S = 5.0  # seconds in which a dead process is found, and a hang after its section's limit
HEADER = ("ordeal", "found as", "found after", "limit", "restarted", "repeated", "lost")


class OrdealHook(Hook):
    """Injects the faults that the environment variable names into one rank."""

    def __init__(self) -> None:
        pairs = (pair.split("=") for pair in os.environ.get(VARIABLE, "").split(",") if pair)
        self.ordeals = {int(step): ordeal for ordeal, step in pairs}

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        ordeal = self.ordeals.get(context.step)
        if ordeal is not None and context.run.groups.rank == RANK:
            try:
                marker(context.run.run_dir, ordeal).touch(exist_ok=False)
            except FileExistsError:  # after the restart the step comes again
                return metrics
            inject(ordeal, context.engine)
        return metrics


def inject(ordeal: str, engine: Engine) -> None:
    """Inject a fault into this process."""
    if ordeal == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ordeal == "hung in step":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif ordeal == "hung in save":
        from hybridtron.checkpoint import node_files

        def hang(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        assert hasattr(node_files, "write_part")  # else the rank would not hang
        node_files.write_part = hang  # type: ignore[assignment]
    elif ordeal == "lost node":
        os.kill(os.getppid(), signal.SIGKILL)  # the kernel then kills this process
        time.sleep(START_S)
    elif ordeal == "corrupt":
        moments = (shard.tensor("exp_avg") for shard in engine.optimizer.shards.values())
        flip(next(moment for moment in moments if moment is not None))


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of an fp32 tensor's first element."""
    import torch  # --help does not need it

    words = tensor.view(-1).view(torch.int32)
    words[0] ^= 1


def arguments(data: Path, steps: int) -> tuple[str, ...]:
    """Return the run's settings as key=value arguments."""
    hook = f"run.hooks=[{OrdealHook.__module__}.{OrdealHook.__name__}]"
    changed = (f"run.timeout={TIMEOUT_S:g}", "run.restarts=3", "run.verify_state=1", "checkpoint.async=false")
    return (*arguments_of(data, steps, "dp2"), *changed, hook)


def placed(ordeals: Sequence[str]) -> dict[str, int]:
    """Return the step of each ordeal.

    Two checkpoints come before each, so that the time of a checkpoint is known. A hang in a save comes at a checkpoint,
    the other faults come three steps after one.
    """
    steps = {}
    for number, ordeal in enumerate(ordeals):
        steps[ordeal] = (2 + 2 * number) * SAVE_EVERY
        steps[ordeal] += SAVE_EVERY if ordeal == "hung in save" else 3
    return steps


def run_supervised(run: Run, ordeals: Mapping[str, int], spares: int = 1) -> list[int]:
    """Start the run's supervisors once, with these ordeals at these steps, and return their exit codes."""
    shared = {VARIABLE: ",".join(f"{ordeal}={step}" for ordeal, step in ordeals.items()), SPARES: str(spares)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"SLURM_NTASKS": str(RANKS + spares), "SLURM_LOCALID": "0"}
    supervisors = []
    try:
        for task in range(RANKS + spares):
            place = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURMD_NODENAME": f"n{task + 1}"}
            supervisors.append(run.start(f"task-{task}.log", TRAIN, shared | place, own_group=True))
        return [wait(supervisor) for supervisor in supervisors]
    finally:
        for supervisor in supervisors:
            supervisor.kill()  # and the kernel kills its rank


def wait(supervisor: subprocess.Popen[bytes]) -> int:
    """Wait for a supervisor's end; kill it if it takes too long, so that no process is left."""
    try:
        return supervisor.wait(2 * START_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        return supervisor.wait()


def wrong(run: Run, ordeals: Mapping[str, int], codes: Sequence[int]) -> list[str]:
    """Describe what is wrong with a run after its ordeals, apart from its results."""
    recorded = faults.read(run.folder)
    failures = []
    killed = int("lost node" in ordeals)
    if sorted(codes) != [-signal.SIGKILL] * killed + [0] * (len(codes) - killed):
        failures.append(f"the supervisors ended with {list(codes)}, and not {killed} killed: see {run.home}/task-0.log")
    if [fault.cause for fault in recorded] != list(ordeals):
        failures.append(f"the faults {list(ordeals)} were found as {[fault.words() for fault in recorded]}")
    late = [fault for fault in recorded if found_after(run, fault) > time_allowed(fault)]
    failures += [f"found after {found_after(run, fault):.1f} s: {fault.words()}" for fault in late]
    return failures + [f"another rank is blamed: {fault.words()}" for fault in recorded if fault.rank != RANK]


def time_allowed(fault: RankFault) -> float:
    """Return the seconds within which a fault must be found."""
    if fault.cause.startswith("hung"):
        return fault.limit_s + LATE_S
    if fault.cause == "corrupt":
        return 4 * LATE_S  # the next step finds the bit, and all ranks end by themselves
    return LATE_S


def found_after(run: Run, fault: RankFault) -> float:
    """Return the seconds from the injection of a fault until the coordinator named it."""
    return fault.time - marker(run.folder, fault.cause).stat().st_mtime


def marker(run_dir: Path, ordeal: str) -> Path:
    """Return the path of a file that is created when an ordeal begins."""
    return run_dir / "logs" / f"ordeal {ordeal}"


def rows(run: Run, recorded: Sequence[RankFault]) -> list[tuple[str, ...]]:
    """Return the report's rows, with the columns of HEADER."""
    return [
        (
            fault.cause,
            fault.detail,
            f"{found_after(run, fault):.1f} s",
            f"{fault.limit_s:.1f} s" if fault.cause.startswith("hung") else "",
            f"{fault.restart_s:.1f} s",
            f"{fault.repeated_s:.1f} s",
            f"{fault.lost_s:.1f} s",
        )
        for fault in recorded
    ]
