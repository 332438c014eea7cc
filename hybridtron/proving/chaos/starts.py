"""What several starts do to one run: a torchrun that is killed and started again at once, and two starts at a time.

The processes of a killed torchrun live on for a while; the next start must wait until they have ended. Of two starts
at a time one trains, and the other is refused, or finds later that there is nothing left to do.
"""

from __future__ import annotations

import random
import subprocess
import time

from hybridtron.proving.chaos.run import PROCESSES, START_S, Run

KILLS = 4  # of torchrun: every other one during start-up
STEPS = 20  # at most between a start and its kill
LOOK_S = 0.05
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
TORCHRUN += ("-m", "hybridtron", "train")


def started(run: Run) -> subprocess.Popen[bytes]:
    """The run as torchrun starts it, whose own store listens everywhere."""
    from hybridtron.parallel.rendezvous import LOOPBACK  # imports torch, which --help does without

    return run.start("torchrun.log", TORCHRUN, {"GLOO_SOCKET_IFNAME": LOOPBACK}, own_group=False)


def wait_until(run: Run, torchrun: subprocess.Popen[bytes], steps: int) -> None:
    """Until N steps more are done, or the start has ended; for 0, until some start holds the folder."""
    until, wanted = time.monotonic() + START_S, len(run.lines()) + steps
    while torchrun.poll() is None and time.monotonic() < until:
        if (run.folder / ".lock").exists() and len(run.lines()) >= wanted:
            return
        time.sleep(LOOK_S)


def survive(run: Run, draw: random.Random) -> list[str]:
    """Kill and restart, and last start the run twice at once; returns what went wrong."""
    for number in range(KILLS):
        torchrun = started(run)
        wait_until(run, torchrun, draw.randrange(1, STEPS) if number % 2 else 0)
        time.sleep(5 * draw.random() * (not number % 2))  # anywhere in the imports
        torchrun.kill()  # it alone; its processes get no signal
        torchrun.wait()
    codes = [torchrun.wait() for torchrun in [started(run), started(run)]]
    found = run.outcome().get("outcome")
    log = run.home / "torchrun.log"
    wrong = [] if 0 in codes and found == "finished" else [f"two starts at a time ended with {codes}, {found}: {log}"]
    return wrong + [f"a start ended with a fault in its files: {log}"] * ("FileNotFoundError" in log.read_text())
