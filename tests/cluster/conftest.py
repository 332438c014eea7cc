"""A real SLURM of two nodes for the session's slow tests, and the runs that are submitted to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import counting_folder  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
TWO_NODES = Path(__file__).with_name("two_nodes.sh")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
KILL_WAIT = 25.0  # more than two_nodes.sh says
PATIENCE = 150.0  # seconds that anything may take; the machine has two cores


@dataclass(frozen=True)
class Cluster:
    """A SLURM that runs; its programs find it by the environment."""

    environment: dict[str, str]

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def reported(self, *command: str) -> str:
        return self.printed(command)

    def printed(self, command: Sequence[str]) -> str:
        """Return what a successful command prints."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, arguments: Sequence[str]) -> list[str]:
        """Submit by slurm/submit.py, once both nodes are idle and respond; return the job ids.

        A node that was down is `idle*` until it responds, and a job that may be smaller starts without it.
        """
        self.wait_until(lambda: self.reported("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2)
        reported = self.printed([sys.executable, "slurm/submit.py", *arguments])
        matched = re.search(r"submitted as job ([\d, ]+);", reported)
        assert matched, reported
        return matched[1].split(", ")

    def job(self, job: str) -> dict[str, str]:
        """Return scontrol's fields for a job."""
        reported = self.reported("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+(?::\w+)?)=(\S*)", reported))

    def wait_until(self, what: Callable[[], Any], *runs: Path) -> Any:
        """Wait for a true value and return it; fail with the logs of these runs after a time limit."""
        until = time.monotonic() + PATIENCE
        while not (value := what()):
            assert time.monotonic() < until, "\n".join([self.controller(), *(logs_of(run) for run in runs)])
            time.sleep(0.2)
        return value

    def controller(self) -> str:
        """Return all jobs' states and the end of the SLURM controller's log."""
        log = Path(self.environment["SLURM_CONF"]).with_name("slurmctld.log").read_text()
        return f"{self.reported('scontrol', 'show', 'job')}\n{log[-6000:]}"

    def minutes(self, job: str) -> int:
        """Whole minutes for which a job has been running."""
        hours, minutes, _ = self.job(job)["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def requeued(self, job: str, run: Path, restarts: int) -> None:
        """Wait until a job was requeued so often and waits, and let it start at once: SLURM waits two minutes."""

        def waits() -> bool:
            reported = self.job(job)
            assert reported["JobState"] not in FINAL, f"{reported}\n{logs_of(run)}"
            return reported["JobState"] == "PENDING" and int(reported["Restarts"]) == restarts

        self.wait_until(waits, run)
        # what is left of a start gets SIGKILL after KillWait, by the number that the next start has too; on a node
        # that is down nobody ends it
        until = time.monotonic() + KILL_WAIT
        self.wait_until(lambda: not steps_of(job) or time.monotonic() > until, run)
        time.sleep(2)  # the nodes refuse a start in the second in which the last one ended, which ends the job
        self.reported("scontrol", "update", f"JobId={job}", "TimeLimit=20", "StartTime=now")

    def ended(self, job: str, run: Path) -> str:
        """The state that a job has ended in."""
        return self.wait_until(lambda: (state := self.job(job)["JobState"]) in FINAL and state, run)


def steps_of(job: str) -> list[str]:
    """The processes that run a job's steps on the nodes."""
    titles = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            titles.append(path.read_text(errors="replace"))
    return [title for title in titles if title.startswith(f"slurmstepd: [{job}.")]


def logs_of(run: Path) -> str:
    """Everything that a run's jobs have said."""
    files = [*sorted((run / "logs").rglob("*.txt")), run / "slurm" / "attempts.jsonl"]
    return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files if path.exists())


def attempts(run: Path) -> list[dict[str, Any]]:
    """The attempts of a run, each as it ended."""
    lines = [json.loads(line) for line in (run / "slurm" / "attempts.jsonl").read_text().splitlines()]
    return list({(line["job"], line["restart"]): line for line in lines}.values())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        why = f"no SLURM of its own: {', '.join(missing) or 'not root'} (make setup-slurm installs it, as root)"
        if os.environ.get("HYBRIDTRON_CI"):
            pytest.fail(why)
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    foreign = ("SLURM_", "SBATCH_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run([TWO_NODES, "start", folder, str(free_ports(4))], env=environment, check=True, timeout=60)
        yield Cluster(environment)
    finally:
        subprocess.run([TWO_NODES, "stop", folder], env=environment, check=True, timeout=90)
        shutil.rmtree(folder)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row on which nobody listens."""
    for first in range(21000 + os.getpid() % 1000, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder with a plain name, as #SBATCH lines need it."""
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    yield folder
    shutil.rmtree(folder)
