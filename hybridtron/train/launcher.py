"""The torchrun that started this process, without which it must not continue for long: another start may come.

A process that has made no step yet ends at once when its launcher dies, wherever it is; later it has GRACE_S to save
and end by itself (see `preempt.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PARENT = os.getppid()  # now, since a launcher may die during the slow imports
GRACE_S = 30.0  # as long as torchrun itself leaves processes that it has asked to stop
LOOK_S = 0.5


class Launcher:
    """Shows whether a torchrun is gone; of others nothing is known, as a shell may end before what it started."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = PARENT if "TORCHELASTIC_RUN_ID" in environment else None
        self.worth_saving = False  # a step was made
        self._died_before = self.process is not None and not _may_be_torchrun(self.process)

    @property
    def is_gone(self) -> bool:
        return self.process is not None and (self._died_before or os.getppid() != self.process)

    def watch(self) -> None:
        """End this process in time when the launcher is gone."""
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
    """Whether a process runs Python as this user, unlike one that adopts the children of a dead torchrun."""
    if not Path("/proc/self").exists():
        return True  # a system without /proc says nothing
    try:
        program = Path(f"/proc/{process}/exe").readlink().name
    except OSError:  # another user's, and torchrun is this user's
        return False
    return program.startswith(("python", "pypy"))
