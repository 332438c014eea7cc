"""Ends this process when the torchrun that started it has died.

If torchrun itself is killed, its processes keep running and keep the lock of the run's folder. A new start of the same
run would wait for that lock. So these processes must end soon. Before its first training step this process has nothing
to save and ends immediately. After its first step it has GRACE_S seconds, in which the training loop saves a checkpoint
and ends the process (`preempt.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PARENT = os.getppid()  # read when this module is imported, since torchrun may die during the slow imports that follow
GRACE_S = 30.0  # seconds; torchrun, too, gives processes 30 s to stop before it kills them
POLL_INTERVAL_S = 0.5  # seconds between checks whether torchrun is alive


class Launcher:
    """Watches the torchrun that started this process, directly or through a wrapper such as a shell script.

    If another program, such as a shell, has started this process, nothing is watched: that program may end while this
    process continues.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.started_by_torchrun = "TORCHELASTIC_RUN_ID" in environment
        self.torchrun = _torchrun_above(PARENT)  # None if torchrun has died already
        self.worth_saving = False  # the training loop sets this to True after its first step

    @property
    def is_gone(self) -> bool:
        """True if torchrun started this process and has died."""
        if not self.started_by_torchrun:
            return False
        if self.torchrun is None or os.getppid() != PARENT:
            return True
        # The parent is alive. If it is torchrun, torchrun is alive too. If it is a wrapper, which outlives torchrun,
        # then torchrun is searched again among the wrapper's ancestors.
        return self.torchrun != PARENT and _torchrun_above(PARENT) != self.torchrun

    def watch(self) -> None:
        """Start a thread that ends this process when torchrun has died.

        The thread ends the process immediately, or after GRACE_S seconds if `worth_saving` is True.
        """
        if self.started_by_torchrun:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while not self.is_gone:
            time.sleep(POLL_INTERVAL_S)
        if self.worth_saving:
            time.sleep(GRACE_S)
        os.write(2, b"this process ends, as its launcher is gone\n")
        os._exit(1)


def _torchrun_above(process: int) -> int | None:
    """Search a process and then its ancestors, and return the first process that may be torchrun, or None."""
    while process > 1:
        if _may_be_torchrun(process):
            return process
        process = _parent_of(process)
    return None


def _parent_of(process: int) -> int:
    """Return the id of a process's parent; 0 if the process is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(fields.rpartition(")")[2].split()[1])  # after ")", which ends the program's name: state, parent


def _may_be_torchrun(process: int) -> bool:
    """Return True if a process runs Python as this user, as torchrun does.

    After torchrun's death its children get a new parent, usually init, which does not run Python as this user.
    """
    if not Path("/proc/self").exists():
        return True  # without /proc, as on macOS, the parent's program is unknown
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # another user's process can't be read, and torchrun runs as this user
        return False
    return program.startswith(("python", "pypy"))
