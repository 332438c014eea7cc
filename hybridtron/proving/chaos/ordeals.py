"""Ordeals: single faults of a supervised run, which must notice each, and end with the bits of an undisturbed run.

`ordeal_hook.py` lists the kinds of faults. The run has a supervisor for each of several nodes, as srun would start
them: a node for each of the layout's ranks, and a spare node. If the system allows mounts, each node has a local disk
of its own, a small file system in memory that is gone when the node's processes are. Local checkpoints are on it, with
a copy of another node's part.

A fault must be noticed within a limit:

    killed, lost node    LATE_S seconds
    hung in ...          the time limit of the section, and LATE_S seconds; the limit may be LONGEST_LIMIT_S seconds
    corrupt              seconds: the next step must find the bit, and then all ranks end by themselves
    full local disk      steps: the next local checkpoint must report it, or that after one in the run's folder
    slow rank            20 steps, as docs/scale.md says of smaller delays: here forward passes take 7 times as long.
                         Ranks are compared with four data-parallel ranks and more

After a restart, training must continue from the newest checkpoint that the fault has left (`resume_step`), on the
spare node if the rank's node was replaced. Checkpoints are written synchronously (`checkpoint.async=false`), so that
the steps at which they are complete are known.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.proving.chaos.faults import unshare_mounts
from hybridtron.proving.chaos.ordeal_hook import DISK_MIB, VARIABLE, OrdealHook, PlannedFault, marker
from hybridtron.proving.chaos.training_run import LAYOUTS, PROCESSES, TRAIN, Run, arguments_of
from hybridtron.train.jsonl import read_lines
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.faults import CORRUPT, RankFault
from hybridtron.train.supervisor.supervisor import SPARES

RANKS = {**dict.fromkeys(LAYOUTS, PROCESSES), "dp4": 4}  # ranks of each layout, each on a node of its own
STEPS = {**dict.fromkeys(LAYOUTS, 20), "dp4": 36}  # length of a run; a slow rank is named up to 20 steps after step 15
EVERY = 4  # steps between checkpoints in the run's folder
LOCAL_EVERY = 2  # steps between local checkpoints
TIMEOUT_S = 120.0  # run.timeout; the shortest limit is a tenth of it for a step, and a fifth for a save
LATE_S = 15.0  # seconds in which a dead process is found, and a hang after its section's limit; long for a busy machine
LONGEST_LIMIT_S = TIMEOUT_S / 2  # longest limit of a section; without measured steps it is longer than TIMEOUT_S
LONGEST_S = 600.0  # longest time of a run; an idle machine needs half a minute
SLOW_STEPS = 20  # steps within which a slow rank is named
COMES_AS = {"broken neighbour copy": "lost node"}  # ordeals that the run's log of faults calls otherwise
UNRECORDED = ("slow rank", "full local disk")  # ordeals after which training continues without a restart
LOSES_NODE = ("lost node", "broken neighbour copy")
NEEDS_MOUNTS = (*LOSES_NODE, "full local disk")  # ordeals for which each node must have a disk of its own


@dataclass(frozen=True)
class Ordeal:
    """A fault in a run with a layout."""

    layout: str
    fault: PlannedFault

    @property
    def kind(self) -> str:
        return self.fault.kind


@dataclass(frozen=True)
class Noticed:
    """A run's notice of its fault.

    words: text from its log
    after, limit: time that it took, and the most that it may take, in the unit `s` or `steps`
    """

    words: str
    after: float
    limit: float
    unit: str


def arguments(data: Path, layout: str, disk: Path) -> tuple[str, ...]:
    """Return the settings of a layout's runs as key=value arguments. Nodes have their local disks at `disk`."""
    hook = f"run.hooks=[{OrdealHook.__module__}.{OrdealHook.__name__}]"
    shared = arguments_of(data, STEPS[layout], layout if layout in LAYOUTS else "dp2")
    changed = (f"run.timeout={TIMEOUT_S:g}", "run.restarts=3", "run.verify_state=1", "checkpoint.async=false")
    changed += ("data.workers=0",)  # starts take half the time
    saves = (f"checkpoint.every={EVERY}", f"checkpoint.local_every={LOCAL_EVERY}", f"checkpoint.local_dir={disk}")
    return (*shared, *changed, *saves, hook)


def step_of(kind: str, number: int) -> int:
    """Return the step of the `number`-th fault of a kind, from 0.

    Two checkpoints come before each, so that the time of a checkpoint is known. A hang in a save comes at a checkpoint,
    the other faults three steps after one, and one step after a local checkpoint.
    """
    step = (2 + number) * EVERY
    if kind == "hung in save":
        return step + EVERY
    return step + 3


def run_supervised(run: Run, layout: str, disk: Path, fault: PlannedFault | None = None) -> list[int]:
    """Start the run's supervisors once, with this fault, and return their exit codes."""
    ranks = RANKS[layout]
    shared = {VARIABLE: str(fault or ""), SPARES: "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"SLURM_NTASKS": str(ranks + 1), "SLURM_LOCALID": "0"}
    shutil.rmtree(disk, ignore_errors=True)  # without mounts, the last run's local checkpoints are here
    disk.mkdir(parents=True, exist_ok=True)
    before = with_own_disk(disk)
    supervisors = []
    deadline = time.monotonic() + LONGEST_S
    try:
        for task in range(ranks + 1):
            place = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURMD_NODENAME": f"n{task + 1}"}
            log = f"task-{task}.log"
            supervisors.append(run.start(log, TRAIN, shared | place, own_group=True, before=before))
        return [wait(supervisor, deadline) for supervisor in supervisors]
    finally:
        for supervisor in supervisors:
            supervisor.kill()  # and the kernel kills its rank


def with_own_disk(disk: Path) -> list[str]:
    """Return a command's first words that give it a file system of its own at `disk`; [] if mounts are not allowed."""
    unshare = unshare_mounts()
    if not unshare:
        return []
    script = f'mount -t tmpfs -o size={DISK_MIB}m hybridtron-chaos "$0" && exec "$@"'
    return [*unshare, "sh", "-c", script, str(disk)]


def wait(supervisor: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for a supervisor's end; kill it at the deadline, so that no process is left."""
    try:
        return supervisor.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        supervisor.kill()
        return supervisor.wait()


def log_of(run: Run) -> str:
    """Return the log of the first task, in which rank 0 and the coordinator write."""
    path = run.home / "task-0.log"
    if path.exists():
        return path.read_text(errors="replace")
    return ""


def noticed(run: Run, ordeal: Ordeal) -> Noticed | None:
    """Return the run's notice of its fault; None if there is none."""
    if ordeal.kind == "slow rank":
        return slow_rank_named(run, ordeal.fault)
    if ordeal.kind == "full local disk":
        return full_disk_reported(run, ordeal.fault)
    recorded = faults.read(run.folder)
    if not recorded:
        return None
    fault = recorded[0]
    begun = marker(run.folder, ordeal.kind)
    if not begun.exists():
        return None
    return Noticed(fault.words(), fault.time - begun.stat().st_mtime, time_allowed(fault), "s")


def slow_rank_named(run: Run, fault: PlannedFault) -> Noticed | None:
    """Find the first step in which only the rank was named as slow; None if it was named before its fault."""
    name = f"{host_of(fault.rank)} rank {fault.rank}"
    for line in read_lines(run.folder / "metrics.jsonl"):
        slow = line.get("slow_ranks") or {}
        if line["step"] <= fault.step and name in slow:
            return None
        if line["step"] > fault.step and slow.keys() == {name}:
            words = ", ".join(f"{rank} is {excess:.0%} slower than its peers" for rank, excess in slow.items())
            return Noticed(words, line["step"] - fault.step, SLOW_STEPS, "steps")
    return None


def full_disk_reported(run: Run, fault: PlannedFault) -> Noticed | None:
    """Find the first local checkpoint after the fault that the log reports as not written for want of room."""
    full = re.escape(f"node {host_of(fault.rank)}: ") + ".*No space left on device"
    for said in re.finditer(rf"LOCAL CHECKPOINT NOT WRITTEN at step (\d+): .*{full}.*", log_of(run)):
        after = int(said[1]) - fault.step
        if after > 0:
            return Noticed(said[0], after, 2 * LOCAL_EVERY, "steps")
    return None


def host_of(rank: int) -> str:
    """Return the name of a rank's node."""
    return f"n{rank + 1}"


def resume_step(fault: PlannedFault) -> int:
    """Return the step of the newest checkpoint that a fault leaves."""
    newest = fault.step
    if fault.kind == "hung in save":
        newest -= 1  # the checkpoint of this step is not complete
    every = LOCAL_EVERY
    if fault.kind == "broken neighbour copy":
        every = EVERY  # only the run's folder has all parts
    return newest - newest % every


def spare_of(ordeal: Ordeal) -> str:
    """Return the host that must take the place of the rank's node; empty if the node must stay."""
    if ordeal.kind in LOSES_NODE or (ordeal.kind == CORRUPT and ordeal.fault.rank > 0):  # the first node always stays
        return host_of(RANKS[ordeal.layout])
    return ""


def wrong(run: Run, ordeal: Ordeal, codes: Sequence[int]) -> list[str]:
    """Describe what is wrong with a run after its ordeal, apart from its results."""
    failures = []
    killed = int(ordeal.kind in LOSES_NODE)
    if sorted(codes) != [-signal.SIGKILL] * killed + [0] * (len(codes) - killed):
        failures.append(f"the supervisors ended with {list(codes)}, and not {killed} killed")
    seen = noticed(run, ordeal)
    if seen is None:
        failures.append("the fault was not noticed")
    elif not 0 <= seen.after <= seen.limit:
        failures.append(f"noticed after {seen.after:.1f} {seen.unit}, of {seen.limit:.1f}")
    recorded = faults.read(run.folder)
    expected = [] if ordeal.kind in UNRECORDED else [COMES_AS.get(ordeal.kind, ordeal.kind)]
    if [fault.cause for fault in recorded] != expected:
        failures.append(f"{expected} was expected in the log of faults: {[fault.words() for fault in recorded]}")
    for fault in recorded:
        failures += wrong_restart(fault, ordeal)
    if ordeal.kind == "broken neighbour copy" and not re.search(r"the copy on node n\d of .* is damaged", log_of(run)):
        failures.append("the log does not name the broken copy")
    return failures


def wrong_restart(fault: RankFault, ordeal: Ordeal) -> list[str]:
    """Describe wrong values of a fault in the run's log, and of the restart after it."""
    failures = []
    if fault.rank != ordeal.fault.rank:
        failures.append(f"another rank is blamed: {fault.words()}")
    if fault.cause.startswith("hung") and fault.limit_s > LONGEST_LIMIT_S:
        failures.append(f"the section's limit was {fault.limit_s:.0f} s, and must be at most {LONGEST_LIMIT_S:.0f} s")
    resumed = resume_step(ordeal.fault)
    if fault.resumed != resumed:
        failures.append(f"training continued from step {fault.resumed}, and not from step {resumed}")
    spare = spare_of(ordeal)
    if fault.spare != spare:
        failures.append(f"the spare node was {fault.spare or 'not used'}, and should be {spare or 'not used'}")
    return failures


def time_allowed(fault: RankFault) -> float:
    """Return the seconds within which a fault must be found."""
    if fault.cause.startswith("hung"):
        return fault.limit_s + LATE_S
    if fault.cause == CORRUPT:
        return 2 * LATE_S  # the next step finds the bit, and all ranks end by themselves
    return LATE_S


def lost_time(run: Run) -> Mapping[str, float]:
    """Return the seconds that a run's faults have cost, by cause."""
    recorded = faults.read(run.folder)
    return {
        "found": sum(fault.found_s for fault in recorded),
        "restarted": sum(fault.restart_s for fault in recorded),
        "repeated": sum(fault.repeated_s for fault in recorded),
    }
