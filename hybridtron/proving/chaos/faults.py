"""Faults that are injected into a run: signals to its processes, damaged checkpoint files, a full disk.

Each kind returns a description of its target, or None if it is not possible at the moment.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridtron.proving.chaos.run import ProcessStart, Run

DISK_MIB = 32  # size of the file system that can be filled


class Disk:
    """A small in-memory file system, mounted at a run's checkpoints folder, that can be filled up.

    Mounting may be forbidden; then `why_not` has the reason and the checkpoints stay on the ordinary disk.
    """

    def __init__(self, run: Run) -> None:
        self.at = run.checkpoints
        self.ballast = run.checkpoints / ".ballast"
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
        """Unmount, keeping the checkpoints on the ordinary disk."""
        if self.why_not is not None:
            return
        self.free()
        copied = self.at.with_name("checkpoints-on-disk")
        shutil.copytree(self.at, copied)
        subprocess.run(["umount", "-l", str(self.at)], check=True)
        self.at.rmdir()
        copied.rename(self.at)

    def fill(self) -> None:
        """Fill the file system to the last byte."""
        with self.ballast.open("wb", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)


@dataclass(frozen=True)
class Scene:
    """Context of a fault: the running processes, the disk, and a random generator."""

    started: ProcessStart
    disk: Disk
    draw: random.Random


def signal_a_rank(scene: Scene, number: signal.Signals) -> str | None:
    """Send a signal to a random rank."""
    rank = scene.draw.randrange(len(scene.started.ranks))
    scene.started.ranks[rank].send_signal(number)
    return f"rank {rank}"


def signal_a_worker(scene: Scene, number: signal.Signals) -> str | None:
    """Send a signal to a random data worker, if there are any."""
    workers = scene.started.workers()
    if not workers:
        return None
    rank = scene.draw.randrange(len(workers))
    os.kill(workers[rank], number)
    return f"worker process of rank {rank}"


def damage(scene: Scene, how: Callable[[bytearray, random.Random], bytearray | None]) -> str | None:
    """Kill the run, and damage a file of its checkpoints.

    The only valid checkpoint is spared, and so is that of the last step, because a finished run is not read again.
    """
    run = scene.started.run
    draw = scene.draw
    if not list(run.checkpoints.glob("step-*")):
        return None
    scene.started.kill()
    from hybridtron.checkpoint import folder as folders  # takes seconds

    paths = folders.all_of(run.folder)
    sound = [path for path in paths if is_sound(path)]
    paths = [path for path in paths if sound not in ([], [path]) and folders.step_of(path) < run.steps]
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
    """Return True if every byte of a checkpoint is as it was written."""
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint

    try:
        return not list(Checkpoint.open(folder).faults())
    except BrokenCheckpoint:
        return False


def flipped(stored: bytearray, draw: random.Random) -> bytearray:
    """Flip a random bit."""
    stored[draw.randrange(len(stored))] ^= 1 << draw.randrange(8)
    return stored


def truncated(stored: bytearray, draw: random.Random) -> bytearray:
    """Cut the file at a random position."""
    return stored[: draw.randrange(len(stored))]


def deleted(stored: bytearray, draw: random.Random) -> None:
    return None


def fill_the_disk(scene: Scene) -> str | None:
    """Fill the checkpoints' file system, if it could be mounted."""
    if scene.disk.why_not is not None:
        return None
    scene.disk.fill()
    return "checkpoints"


FULL_DISK = "full disk"
KINDS: dict[str, Callable[[Scene], str | None]] = {
    "SIGKILL a rank": lambda scene: signal_a_rank(scene, signal.SIGKILL),
    "SIGSTOP a rank": lambda scene: signal_a_rank(scene, signal.SIGSTOP),
    "SIGTERM a rank": lambda scene: signal_a_rank(scene, signal.SIGTERM),
    "SIGKILL the loader": lambda scene: signal_a_worker(scene, signal.SIGKILL),
    "SIGSTOP the loader": lambda scene: signal_a_worker(scene, signal.SIGSTOP),
    "flip a bit": lambda scene: damage(scene, flipped),
    "truncate a file": lambda scene: damage(scene, truncated),
    "delete a file": lambda scene: damage(scene, deleted),
    FULL_DISK: fill_the_disk,
}


def strike(scene: Scene, left: list[str]) -> tuple[str, str] | None:
    """Inject the first possible kind of fault in `left`; return its kind and target, or None if no kind is possible.

    When `left` is empty, it is refilled with all kinds in random order, so that each kind comes once before any
    repeats.
    """
    for _ in range(2):  # if none of the remaining kinds is possible, start over with all
        left[:] = left or scene.draw.sample(list(KINDS), len(KINDS))
        for kind in left:
            hit = KINDS[kind](scene)
            if hit is not None:
                left.remove(kind)
                return kind, hit
        left.clear()
    return None
