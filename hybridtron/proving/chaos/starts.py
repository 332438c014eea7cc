"""Overlapping starts of one run: a torchrun that is killed and restarted at once, and two starts at the same time.

The processes of a killed torchrun live on for a while, and the next start must wait until they have ended. Of two
simultaneous starts one trains, and the other is refused, or finds later that no training remains.
"""

from __future__ import annotations

import random
import subprocess
import time

from hybridtron.proving.chaos.run import PROCESSES, START_S, Run

KILLS = 4  # kills of torchrun, every other one during start-up
STEPS = 20  # maximum number of steps between a start and its kill
LOOK_S = 0.05
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
TORCHRUN += ("-m", "hybridtron", "train")


def started(run: Run) -> subprocess.Popen[bytes]:
    """Start the run by torchrun, whose store listens on all interfaces."""
    from hybridtron.parallel.rendezvous import LOOPBACK  # imports torch, which --help does not need

    return run.start("torchrun.log", TORCHRUN, {"GLOO_SOCKET_IFNAME": LOOPBACK}, own_group=False)


def wait_until(run: Run, torchrun: subprocess.Popen[bytes], steps: int) -> None:
    """Wait until `steps` more steps are done or the start has ended; with 0, until a start holds the run's lock."""
    until = time.monotonic() + START_S
    target_count = len(run.lines()) + steps
    while torchrun.poll() is None and time.monotonic() < until:
        if (run.folder / ".lock").exists() and len(run.lines()) >= target_count:
            return
        time.sleep(LOOK_S)


def survive(run: Run, draw: random.Random) -> list[str]:
    """Kill and restart the run several times, and finally start it twice at once. Return descriptions of all
    failures.
    """
    for number in range(KILLS):
        torchrun = started(run)
        wait_until(run, torchrun, draw.randrange(1, STEPS) if number % 2 else 0)
        time.sleep(5 * draw.random() * (not number % 2))  # a random moment during the imports
        torchrun.kill()  # torchrun alone: its ranks get no signal
        torchrun.wait()
    codes = [torchrun.wait() for torchrun in [started(run), started(run)]]
    end = run.outcome().get("outcome")
    log = run.home / "torchrun.log"
    if 0 in codes and end == "finished":
        wrong = []
    else:
        wrong = [f"two starts at a time ended with {codes}, {end}: {log}"]
    return wrong + [f"a start ended with a fault in its files: {log}"] * ("FileNotFoundError" in log.read_text())
