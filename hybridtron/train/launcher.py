"""Watch on the torchrun that started this process: the process must not outlive it.

Another start of the run may follow and wait for its folder. If the launcher dies before the first step is done, the
process ends at once. Later it has GRACE_S to save a checkpoint and end by itself (see `preempt.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PARENT = os.getppid()  # taken at import, since a launcher may die during the slow imports
GRACE_S = 30.0  # the time torchrun leaves processes to stop before it kills them
LOOK_S = 0.5  # between looks for the launcher


class Launcher:
    """Watches the torchrun that started this process.

    Other launchers are not watched: a shell may end before the programs that it started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if "TORCHELASTIC_RUN_ID" in environment:
            self.process = PARENT
        else:
            self.process = None
        self.worth_saving = False  # set once a step is done
        self._died_before = self.process is not None and not _may_be_torchrun(self.process)

    @property
    def is_gone(self) -> bool:
        """True if torchrun started this process and has died."""
        return self.process is not None and (self._died_before or os.getppid() != self.process)

    def watch(self) -> None:
        """Start a thread to end this process when the launcher dies: at once, or after GRACE_S if a step is done."""
        if self.process is not None:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while not self.is_gone:
            time.sleep(LOOK_S)
        if self.worth_saving:
            time.sleep(GRACE_S)
        os.write(2, b"this process ends, as its launcher is gone\n")
        os._exit(1)


def _may_be_torchrun(process: int) -> bool:
    """Return True if a process runs Python as this user, unlike one that adopts a dead torchrun's children."""
    if not Path("/proc/self").exists():
        return True  # without /proc it can't be known
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # it belongs to another user, and torchrun to this one
        return False
    return program.startswith(("python", "pypy"))
