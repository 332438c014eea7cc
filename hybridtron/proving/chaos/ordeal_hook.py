"""A hook that injects the fault of an ordeal into a rank, after a certain step and once.

killed                   SIGKILL for the rank
hung in step             SIGSTOP for the rank, between two steps
hung in save             SIGSTOP for the rank while it writes its part of a checkpoint
slow rank                each forward pass through the rank's model takes SLOWER times its duration longer, until the
                         run ends
corrupt                  a flipped bit in a moment of the rank
lost node                SIGKILL for the rank's supervisor; its node's disk is lost, too
full local disk          the disk of the rank's node is full until the run ends
broken neighbour copy    a lost node whose part of the newest local checkpoint has a flipped bit on the other node
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.engine.engine import Engine

KINDS = (
    "killed",
    "hung in step",
    "hung in save",
    "slow rank",
    "corrupt",
    "lost node",
    "full local disk",
    "broken neighbour copy",
)
VARIABLE = "HYBRIDTRON_ORDEAL"  # environment variable: the fault that a rank injects, such as `killed,1,11`
SLOWER = 6.0  # pause after a forward pass, in durations of the pass
DISK_MIB = 32  # size of a file system that may be filled
BALLAST = ".ballast"  # name of the file that fills it
WAIT_S = 60.0  # seconds to wait for another rank, or for the own end


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a kind in KINDS, in a rank, after a step."""

    kind: str
    rank: int
    step: int

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Read the value of the environment variable; None if it is empty."""
        if not text:
            return None
        kind, rank, step = text.split(",")
        return cls(kind, int(rank), int(step))

    def __str__(self) -> str:
        return f"{self.kind},{self.rank},{self.step}"


class OrdealHook(Hook):
    """Injects the fault that the environment variable names, and lets each simulated node have a name of its own."""

    def __init__(self) -> None:
        self.fault = PlannedFault.read(os.environ.get(VARIABLE, ""))
        host = os.environ["SLURMD_NODENAME"]
        socket.gethostname = lambda: host  # by this name ranks decide which of them share a node

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        fault = self.fault
        if fault is None or context.step != fault.step:
            return metrics
        rank = context.run.groups.rank
        if fault.kind == "broken neighbour copy":
            neighbour = (fault.rank + 1) % context.run.groups.world_size
            if rank == neighbour and first_time(context.run.run_dir, "broken copy"):
                break_copy(local_disk(context), fault.rank)
                marker(context.run.run_dir, "broken copy").write_text("done")
        if rank == fault.rank and first_time(context.run.run_dir, fault.kind):
            inject(fault.kind, context)
        return metrics


def marker(run_dir: Path, kind: str) -> Path:
    """Return the path of a fault's marker, whose modification time is the time of the fault."""
    return run_dir / "logs" / f"ordeal {kind}"


def first_time(run_dir: Path, kind: str) -> bool:
    """Create a fault's marker; return False if it exists, because the step comes again after a restart."""
    try:
        marker(run_dir, kind).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def local_disk(context: StepContext) -> Path:
    """Return the folder of local checkpoints, which is a disk of this node."""
    folder = context.run.config.checkpoint.local_dir
    assert folder is not None
    return Path(folder)


def inject(kind: str, context: StepContext) -> None:
    """Inject a fault into this process."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hung in step":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hung in save":
        hang_in_save()
    elif kind == "slow rank":
        slow_down(context.engine)
    elif kind == "corrupt":
        moments = (shard.tensor("exp_avg") for shard in context.engine.optimizer.shards.values())
        flip(next(moment for moment in moments if moment is not None))
    elif kind == "full local disk":
        fill_disk_of_its_own(local_disk(context))
    elif kind == "lost node":
        lose_node()
    elif kind == "broken neighbour copy":
        wait_for_text(marker(context.run.run_dir, "broken copy"))
        os.utime(marker(context.run.run_dir, kind))  # the fault begins now, and not before the wait
        lose_node()


def lose_node() -> None:
    """Kill this rank's supervisor. The kernel then kills this process."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(WAIT_S)


def wait_for_text(path: Path) -> None:
    """Wait until another rank has written into a file. Raises RuntimeError after WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.read_text()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no rank has written into {path} within {WAIT_S:.0f} s")
        time.sleep(0.01)


def hang_in_save() -> None:
    """Let this process suspend itself when it next writes its part of a checkpoint."""
    from hybridtron.checkpoint import node_files

    def hang(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    assert hasattr(node_files, "write_part")  # else the rank would not hang
    node_files.write_part = hang  # type: ignore[assignment]


def slow_down(engine: Engine) -> None:
    """Let each forward pass of this rank wait for SLOWER times its duration, without using the processor."""
    began = 0.0

    def begin(*_: object) -> None:
        nonlocal began
        began = time.monotonic()

    def wait(*_: object) -> None:
        time.sleep(SLOWER * (time.monotonic() - began))

    model = engine.stages[0].model
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(wait)


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of an fp32 tensor's first element."""
    import torch  # --help does not need it

    words = tensor.view(-1).view(torch.int32)
    words[0] ^= 1


def fill_disk_of_its_own(disk: Path) -> None:
    """Fill a small file system to the last byte. Raises RuntimeError if the folder is on a disk of the machine."""
    if not disk.is_mount() or shutil.disk_usage(disk).total > DISK_MIB * 2**20:
        raise RuntimeError(f"{disk} is no file system of its own of {DISK_MIB} MiB, so it is not filled")
    with (disk / BALLAST).open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def break_copy(disk: Path, part: int) -> None:
    """Flip a bit in the largest file of the newest local checkpoint's copy of another node's part."""
    newest = sorted(disk.glob(f"*/*/step-*/part-{part:05}"), key=lambda path: path.parent.name)[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    stored = bytearray(largest.read_bytes())
    stored[-1] ^= 1
    largest.write_bytes(stored)
