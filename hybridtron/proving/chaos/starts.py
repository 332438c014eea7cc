"""What several starts do to one run: a torchrun that is killed and started again at once, and two starts at a time.

The processes of a killed torchrun live on for a while; the next start must wait until they have ended. Of two starts
at a time one trains, and the other is refused, or finds later that there is nothing left to do.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress

from hybridtron.proving.chaos.run import PROCESSES, START_S, Run

KILLS = 4  # of torchrun: every other one during start-up
STEPS = 20  # at most between a start and its kill
LOOK_S = 0.05
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
TORCHRUN += ("-m", "hybridtron", "train")


class TorchrunStart:
    """A run as torchrun starts it."""

    def __init__(self, run: Run) -> None:
        self.run, self.before = run, run.lines()
        self.process = run.start("torchrun.log", TORCHRUN, {}, own_group=False)

    def wait_until(self, steps: int) -> None:
        """Until N steps are done since this start, or it has ended; for 0, until some start holds the folder."""
        until = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until:
            if (self.run.folder / ".lock").exists() and len(self.run.lines()) >= len(self.before) + steps:
                return
            time.sleep(LOOK_S)

    def kill(self) -> None:
        """Torchrun alone; its processes get no signal."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def survive(run: Run, draw: random.Random) -> list[str]:
    """Kill and restart, and last start the run twice at once; returns what went wrong."""
    for number in range(KILLS):
        launch = TorchrunStart(run)
        launch.wait_until(draw.randrange(1, STEPS) if number % 2 else 0)
        time.sleep(5 * draw.random() * (not number % 2))  # anywhere in the imports
        launch.kill()
    both = [TorchrunStart(run) for _ in range(2)]
    codes = [launch.process.wait() for launch in both]
    found = run.outcome().get("outcome")
    log = run.home / "torchrun.log"
    wrong = [] if 0 in codes and found == "finished" else [f"two starts at a time ended with {codes}, {found}: {log}"]
    return wrong + [f"a start ended with a fault in its files: {log}"] * ("FileNotFoundError" in log.read_text())
