"""Recovery inside a launch: a process that starts a rank as its child, and starts it again after a fault of any rank.

With `run.restarts` every process that a launcher starts (srun, torchrun, or a shell) is a supervisor, which needs no
torch. It starts the same command as its child, which trains. All supervisors are connected to the first supervisor.
It is the coordinator (`coordinator.py`), which decides what happens after a fault.

Signals to a supervisor reach its child, so that a preempted run saves. If a supervisor is killed, the kernel kills its
child. If the coordinator is lost, all other supervisors end their children. If torchrun has died, the children have
launcher.GRACE_S seconds to save, as without a supervisor.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from hybridtron.config.pipeline_layout import launched
from hybridtron.config.schema import RunConfig
from hybridtron.listening import LOCALHOST
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.launcher import GRACE_S, Launcher
from hybridtron.train.outcome import EXIT_PREEMPTED, GONE
from hybridtron.train.preempt import SIGNALS
from hybridtron.train.supervisor.child import STACKS, Child
from hybridtron.train.supervisor.coordinator import Coordinator, LaunchPlan
from hybridtron.train.supervisor.hub import Hub
from hybridtron.train.supervisor.lines import LineClosed, MeetingPlace, Message, MessageLine, connect, meeting_file
from hybridtron.train.supervisor.sections import VARIABLE, SectionClock

POLL_S = 0.1
STACKS_S = 1.0  # seconds for a rank to write its stacks and its collectives; less than coordinator.LOOK_S
GONE_S = 1.0  # seconds for the last threads of a process that ends
LAUNCHER_S = 1.0  # seconds between checks whether torchrun is alive
GOODBYE_S = 10.0  # seconds for the other supervisors to end
SPARES = "HYBRIDTRON_SPARES"  # environment variable: number of spare nodes, which the job script sets
# description of the work of a rank that was not started
NOTHING: Message = {"section": "start", "doing": "nothing", "step": 0, "elapsed": 0.0, "limit": 0.0, "step_s": 0.0}


@dataclass(frozen=True)
class Place:
    """The place that a launcher has given to this process.

    task, tasks: the process's number in the launch, and the number of processes
    node, local: the node's number, and the process's number on the node
    host: the node's name
    """

    task: int
    tasks: int
    node: int
    local: int
    host: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the place from the variables of torchrun or srun."""
        launch = launched(environment)
        if "RANK" in environment:
            node_name = "GROUP_RANK"
            local_name = "LOCAL_RANK"
        else:
            node_name = "SLURM_NODEID"
            local_name = "SLURM_LOCALID"
        node = int(environment.get(node_name, "0"))
        local = int(environment.get(local_name, "0"))
        host = environment.get("SLURMD_NODENAME", socket.gethostname())
        return cls(launch.rank, launch.world_size, node, local, host)

    @property
    def hello(self) -> Message:
        return {"kind": "hello", "task": self.task, "node": self.node, "local": self.local, "host": self.host}


def is_supervisor(run: RunConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process must supervise a rank: `run.restarts` is set, and no supervisor has started it."""
    return bool(run.restarts) and VARIABLE not in environment


def supervise(run: RunConfig) -> int:
    """Start the rank as a child, and start it again after faults. Returns the exit code of the launch."""
    place = Place.of(os.environ)
    if problems := launch_problems(run, place, os.environ):
        raise ConfigError(problems)
    allow_open_files()
    supervisor = Supervisor(place, SectionClock(run.timeout))
    for number in SIGNALS:
        signal.signal(number, supervisor.on_signal)
    path = meeting_file(Path(run.dir), os.environ)
    if place.task > 0:
        try:
            return loop(supervisor, connect(path, place.hello), None)
        except LineClosed as error:
            say(f"supervisor of task {place.task}: {error}")
            return 1
    plan = LaunchPlan(Path(run.dir), place.tasks, int(os.environ.get(SPARES) or 0), run.restarts or 0)
    coordinator = Coordinator(plan, say)
    listener = None
    if place.tasks > 1:
        listener = MeetingPlace(path, os.environ.get("MASTER_ADDR", LOCALHOST))
    line_end, hub_end = socket.socketpair()
    line = MessageLine(line_end)
    line.send(place.hello)
    hub = Hub(coordinator, listener, MessageLine(hub_end))
    try:
        return loop(supervisor, line, hub)
    finally:
        hub.close()


def loop(supervisor: Supervisor, line: MessageLine, hub: Hub | None) -> int:
    """Pass messages between the supervisor and the coordinator until the launch ends. Returns the exit code.

    `hub` is the coordinator with its connections, in the first supervisor's process.
    """
    deadline = float("inf")
    while True:
        wait_for([line.socket, *supervisor.pipes, *([] if hub is None else hub.sockets)])
        now = time.monotonic()
        if hub is not None:
            hub.tick(now)
        if supervisor.code is None:
            try:
                for message in line.receive():
                    supervisor.handle(message)
                supervisor.tick(now)
                for message in supervisor.take_messages():
                    line.send(message)
                line.tick(now)
            except LineClosed as error:
                supervisor.give_up(f"the coordinator is lost: {error}")
        if supervisor.code is not None:
            deadline = min(deadline, now + GOODBYE_S)
            if hub is None or hub.is_alone or now > deadline:
                return supervisor.code


def launch_problems(run: RunConfig, place: Place, environment: Mapping[str, str]) -> list[Problem]:
    """List the reasons why this launch can't start its ranks again."""
    problems = []
    if run.resume != "auto":
        cure = "use run.resume=auto, or run.restarts=0"
        why = f"is {run.restarts}, but run.resume={run.resume} would apply to every restart"
        problems.append(Problem("run.restarts", "conflict", f"{why}, and so discard this run's steps: {cure}"))
    if place.tasks > 1 and not environment.get("MASTER_ADDR"):
        cure = "export the first node's address, or use hybridtron submit, whose script exports it"
        problems.append(Problem("MASTER_ADDR", "missing", f"is not set, so that ranks can't connect: {cure}"))
    return problems


def allow_open_files() -> None:
    """Raise this process's limit of open files: the coordinator has a connection to each supervisor."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def wait_for(sources: Sequence[socket.socket | int]) -> None:
    """Wait up to POLL_S seconds until something can be read from one of these sockets and pipes."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        selector.select(POLL_S)


class Supervisor:
    """Starts, watches and ends the child of one task.

    `code` is the launch's exit code, once the launch is over.
    """

    def __init__(self, place: Place, clock: SectionClock) -> None:
        self.place = place
        self.clock = clock
        self.child: Child | None = None
        self.generation = -1
        self.code: int | None = None
        self.signals: list[int] = []
        self.launcher = Launcher(os.environ)
        self._out: list[Message] = []
        self._signalled = False  # True once this process was asked to stop
        self._hung = False  # True once a hang of this child was reported
        self._looked = 0.0  # the time of the last check of torchrun
        self._gone_until: float | None = None  # the end of the time to save after torchrun's death

    @property
    def pipes(self) -> list[int]:
        return [] if self.child is None else [self.child.pipe]

    def on_signal(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)

    def take_messages(self) -> list[Message]:
        """Return the messages for the coordinator, and forget them."""
        messages = self._out
        self._out = []
        return messages

    def handle(self, message: Message) -> None:
        """Do what the coordinator asks."""
        kind = message["kind"]
        if kind == "start":
            self._start(message)
        elif kind == "look":
            self._describe(message["why"])
        elif kind == "stop":
            self._stop()
        elif kind == "end":
            self._end_child()
            self.code = message["code"]

    def tick(self, now: float) -> None:
        """Forward signals, and look after the child: its work, its end, and its time limit."""
        while self.signals:
            self._forward(self.signals.pop(0))
        if self.child is None:
            return
        if self.child.listen(now):
            self._send("trained", {"resumed": self.child.first_step})
        code = self.child.process.poll()
        if code is not None:
            self._report_end(self.child, code)
        elif not self._hung and self.child.elapsed > self.clock.limit():
            self._hung = True
            self._send("hung", {})
        if now > self._looked + LAUNCHER_S:
            self._looked = now
            self._look_for_launcher(now)

    def give_up(self, why: str) -> None:
        """End the child and this supervisor."""
        say(f"task {self.place.task}: {why}")
        self._end_child()
        self.code = 1

    def _send(self, kind: str, fields: Mapping[str, object]) -> None:
        self._out.append({"kind": kind, "generation": self.generation, **fields})

    def _start(self, message: Message) -> None:
        self.generation = message["generation"]
        self._hung = False
        self.clock.restart(time.monotonic(), message["resumes"])
        if self._signalled:  # the signal came after the coordinator had decided to start
            self._out.append({"kind": "ended", "generation": self.generation, "code": EXIT_PREEMPTED, **NOTHING})
            return
        variables = {"RANK": message["rank"], "WORLD_SIZE": message["ranks"], "LOCAL_RANK": self.place.local}
        variables |= {"MASTER_ADDR": os.environ.get("MASTER_ADDR", LOCALHOST), "MASTER_PORT": message["port"]}
        self.child = Child(self.clock, {name: str(value) for name, value in variables.items()})

    def _describe(self, why: str) -> None:
        """Describe the child's work, or its end; after a hang, the child also writes its stacks and collectives."""
        if self.child is None:
            return
        if why == "hung" and self.child.has_announced:  # before its first piece of work it does not handle the signal
            self.child.forward(STACKS)
            time.sleep(STACKS_S)
        report = self.child.report()
        if report["fault"] == GONE:  # a process that ends is gone while its last threads still run, and has no code yet
            with suppress(subprocess.TimeoutExpired):
                self.child.process.wait(GONE_S)
        code = self.child.process.poll()
        if code is None:
            self._send("work", report)
        else:
            self._report_end(self.child, code)

    def _stop(self) -> None:
        if self.child is None:
            return
        if self.child.elapsed > self.clock.limit():
            self.clock.give_up(time.monotonic())
        self._report_end(self.child, self.child.end())

    def _report_end(self, child: Child, code: int | None) -> None:
        if code is None or child.end() is None:  # `end` also kills the workers of a rank that has ended
            self.give_up(f"process {child.process.pid} can't be killed, so this node is given up")
            return
        child.listen(time.monotonic())
        if self._signalled and not self.clock.has_trained and -code in SIGNALS:  # before the rank handles signals
            code = EXIT_PREEMPTED
        self._send("ended", {"code": code, **child.report()})
        child.close()
        self.child = None

    def _end_child(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child.close()
            self.child = None

    def _forward(self, number: int) -> None:
        self._signalled = True
        if self.child is not None:
            self.child.forward(number)
        self._out.append({"kind": "signal", "number": number})

    def _look_for_launcher(self, now: float) -> None:
        """End the child if torchrun has died, after GRACE_S seconds if it has something to save."""
        if self._gone_until is None and self.launcher.is_gone:
            self._gone_until = now
            if self.clock.has_trained:
                self._gone_until += GRACE_S
                self._forward(signal.SIGTERM)
        if self._gone_until is not None and now >= self._gone_until:
            self.give_up("its launcher is gone")


def say(text: str) -> None:
    """Write a line with the time to this process's log."""
    os.write(2, f"{time.strftime('%F %T')} supervisor: {text}\n".encode())
    sys.stderr.flush()
