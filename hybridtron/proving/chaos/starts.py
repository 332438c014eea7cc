"""Overlapping starts of one run: torchrun is killed and restarted immediately, and started twice at the same time.

After torchrun is killed, its training processes continue for a while. The next start must wait until these processes
have ended. If two torchruns start at the same time, one of them trains. The other torchrun either exits with an error,
or waits for the first torchrun and then finds the run finished.
"""

from __future__ import annotations

import random
import subprocess
import time

from hybridtron.proving.chaos.training_run import PROCESSES, START_S, Run

KILLS = 4  # number of kills of torchrun, alternately while it starts up and while it trains
STEPS = 20  # limit on the number of training steps between a start and its kill
POLL_INTERVAL_S = 0.05
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
TORCHRUN += ("-m", "hybridtron", "train")


def start_by_torchrun(run: Run) -> subprocess.Popen[bytes]:
    """Start the run by torchrun, with gloo on the loopback interface."""
    from hybridtron.parallel.rendezvous import LOOPBACK  # imports torch, which --help does not need

    return run.start("torchrun.log", TORCHRUN, {"GLOO_SOCKET_IFNAME": LOOPBACK}, own_group=False)


def wait_until(run: Run, torchrun: subprocess.Popen[bytes], steps: int) -> None:
    """Wait until the run has trained `steps` more steps, torchrun has exited, or START_S seconds have passed.

    If `steps` is 0, wait only until the run's lock file exists.
    """
    deadline = time.monotonic() + START_S
    target_count = len(run.lines()) + steps
    while torchrun.poll() is None and time.monotonic() < deadline:
        if (run.folder / ".lock").exists() and len(run.lines()) >= target_count:
            return
        time.sleep(POLL_INTERVAL_S)


def survive(run: Run, draw: random.Random) -> list[str]:
    """Kill and restart torchrun KILLS times, then start two torchruns at the same time.

    Return a description of each failure.
    """
    for number in range(KILLS):
        torchrun = start_by_torchrun(run)
        wait_until(run, torchrun, draw.randrange(1, STEPS) if number % 2 else 0)
        # a kill during start-up comes up to 5 s after the lock file exists, at random
        time.sleep(5 * draw.random() * (not number % 2))
        torchrun.kill()  # the ranks get no signal
        torchrun.wait()
    codes = [torchrun.wait() for torchrun in [start_by_torchrun(run), start_by_torchrun(run)]]
    outcome = run.outcome().get("outcome")
    log = run.home / "torchrun.log"
    if 0 in codes and outcome == "finished":
        failures = []
    else:
        failures = [
            f"two torchruns at the same time exited with {codes}, and the run's outcome is {outcome}: see {log}"
        ]
    return failures + [f"a process did not find a file: see FileNotFoundError in {log}"] * (
        "FileNotFoundError" in log.read_text()
    )
