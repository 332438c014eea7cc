"""Faults that are injected into a run: signals to its processes, damaged checkpoint files, a full disk.

Each kind of fault is a function in `KINDS`. The function injects the fault and returns a description of the target. If
the fault is not possible at the moment, the function returns None.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridtron.proving.chaos.ordeal_hook import BALLAST, DISK_MIB, fill_disk_of_its_own
from hybridtron.proving.chaos.training_run import ProcessStart, Run


def unshare_mounts() -> list[str]:
    """Return a command's first words that give it a mount namespace of its own; [] if the system allows none."""
    if shutil.which("unshare") is None:
        return []
    for unshare in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0:
            return unshare
    return []


class Disk:
    """A small in-memory file system that can be filled up, mounted at a run's checkpoints folder.

    If mounting fails, `why_not` has the reason, and the run writes its checkpoints to the ordinary disk. `why_not` is
    None while the file system is mounted.
    """

    def __init__(self, run: Run) -> None:
        self.at = run.checkpoints
        self.why_not: str | None = "not mounted"

    def __enter__(self) -> Disk:
        self.at.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "hybridtron-chaos", str(self.at)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                self.why_not = process.stderr.strip() or "mount failed"
            else:
                self.why_not = None
        except OSError as error:
            self.why_not = str(error)
        return self

    def __exit__(self, *_: object) -> None:
        """Copy the checkpoints to the ordinary disk, and unmount the file system."""
        if self.why_not is not None:
            return
        self.free()
        copied = self.at.with_name("checkpoints-on-disk")
        shutil.copytree(self.at, copied)
        subprocess.run(["umount", "-l", str(self.at)], check=True)
        self.at.rmdir()
        copied.rename(self.at)

    def fill(self) -> None:
        """Fill the file system to the last byte. Raises RuntimeError if it is a disk of the machine."""
        fill_disk_of_its_own(self.at)

    def free(self) -> None:
        """Delete the file that fills the file system."""
        (self.at / BALLAST).unlink(missing_ok=True)


@dataclass(frozen=True)
class FaultContext:
    """Values that a fault's function uses: the running processes, the disk, and a random generator."""

    started: ProcessStart
    disk: Disk
    draw: random.Random


def signal_a_rank(context: FaultContext, number: signal.Signals) -> str | None:
    """Send a signal to a random rank."""
    rank = context.draw.randrange(len(context.started.ranks))
    context.started.ranks[rank].send_signal(number)
    return f"rank {rank}"


def signal_a_worker(context: FaultContext, number: signal.Signals) -> str | None:
    """Send a signal to a random data worker; return None if there are no workers."""
    workers = context.started.workers()
    if not workers:
        return None
    rank = context.draw.randrange(len(workers))
    os.kill(workers[rank], number)
    return f"worker process of rank {rank}"


def damage(context: FaultContext, how: Callable[[bytearray, random.Random], bytearray | None]) -> str | None:
    """Kill the run, and change a random checkpoint file by `how`. Return None if there is no checkpoint yet.

    `how` maps the stored bytes to new bytes, or to None to delete the file. The file is either part of a checkpoint, or
    the pointer to the newest checkpoint. Two checkpoints are not damaged:

    - the only valid checkpoint, because the run must be able to resume
    - the last step's checkpoint, because a finished run does not read it again
    """
    run = context.started.run
    draw = context.draw
    if not list(run.checkpoints.glob("step-*")):
        return None
    context.started.kill()
    from hybridtron.checkpoint import folder as folders  # the import takes seconds

    paths = folders.all_of(run.folder)
    valid = [path for path in paths if is_sound(path)]
    paths = [path for path in paths if valid not in ([], [path]) and folders.step_of(path) < run.steps]
    files = sorted(file for path in paths for file in path.glob("*"))
    files += run.checkpoints.glob(folders.POINTER)
    if not files:
        return "nothing; the run was killed"
    target = draw.choice(files)
    stored = how(bytearray(target.read_bytes()), draw)
    if stored is None:
        target.unlink()
    else:
        target.write_bytes(stored)
    return str(target.relative_to(run.checkpoints))


def is_sound(folder: Path) -> bool:
    """Return whether a checkpoint is valid: every byte is as it was written."""
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint

    try:
        return not list(Checkpoint.open(folder).faults())
    except BrokenCheckpoint:
        return False


def flipped(stored: bytearray, draw: random.Random) -> bytearray:
    """Return the bytes with a random bit flipped."""
    stored[draw.randrange(len(stored))] ^= 1 << draw.randrange(8)
    return stored


def truncated(stored: bytearray, draw: random.Random) -> bytearray:
    """Return the bytes before a random position."""
    return stored[: draw.randrange(len(stored))]


def deleted(stored: bytearray, draw: random.Random) -> None:
    return None  # for this result, `damage` deletes the file


def fill_the_disk(context: FaultContext) -> str | None:
    """Fill the file system that holds the checkpoints; return None if no such file system is mounted."""
    if context.disk.why_not is not None:
        return None
    context.disk.fill()
    return "checkpoints"


FULL_DISK = "full disk"
KINDS: dict[str, Callable[[FaultContext], str | None]] = {
    "SIGKILL a rank": lambda context: signal_a_rank(context, signal.SIGKILL),
    "SIGSTOP a rank": lambda context: signal_a_rank(context, signal.SIGSTOP),
    "SIGTERM a rank": lambda context: signal_a_rank(context, signal.SIGTERM),
    "SIGKILL the loader": lambda context: signal_a_worker(context, signal.SIGKILL),
    "SIGSTOP the loader": lambda context: signal_a_worker(context, signal.SIGSTOP),
    "flip a bit": lambda context: damage(context, flipped),
    "truncate a file": lambda context: damage(context, truncated),
    "delete a file": lambda context: damage(context, deleted),
    FULL_DISK: fill_the_disk,
}


def inject_fault(context: FaultContext, remaining: list[str]) -> tuple[str, str] | None:
    """Inject the first kind of fault in `remaining` that is possible now, and remove this kind from the list.

    Return the kind and its target, or None if no kind is possible. An empty `remaining` is refilled with all kinds in
    random order, so that each possible kind is injected once before any kind repeats.
    """
    for _ in range(2):  # if none of the remaining kinds is possible, try again with all kinds
        remaining[:] = remaining or context.draw.sample(list(KINDS), len(KINDS))
        for kind in remaining:
            target = KINDS[kind](context)
            if target is not None:
                remaining.remove(kind)
                return kind, target
        remaining.clear()
    return None
