"""Decisions for all supervisors of a launch: who is at fault, whether all ranks start again, and on which nodes.

The supervisor of the first task is also the coordinator. Ranks that end with 0, 2 (refused) or 75 (preempted) end the
launch with this code. Any other end, a hang, or a lost node is a fault:

    1. All supervisors describe the work of their ranks, and one rank is named as the cause. After a hang, all ranks
       have also written their collectives (`collectives.py`), which may name a rank if all are at the same work.
    2. All ranks are ended.
    3. A lost node is replaced by a spare node, and so is a node with two faults in a row or with a corrupt rank, except
       the first task's node. Then all ranks start again, and resume from the newest checkpoint.

After `restarts` faults in a row without a newer checkpoint, if the same error comes again, or if a lost node can't be
replaced, the launch ends with code 1. A job of `hybridtron submit` is then requeued. The same happens if the first
task's node is lost, because the coordinator and the ranks' store are there.

`Coordinator` has no sockets, processes or threads: it receives messages, and collects its answers in `out`.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.config.checks.export import newest_step
from hybridtron.train.collectives import compare_at_hang
from hybridtron.train.jsonl import read_record, written_at
from hybridtron.train.outcome import EXIT_PREEMPTED
from hybridtron.train.outcome import FILE as OUTCOME
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.faults import RankFault
from hybridtron.train.supervisor.lines import JOIN_S, Message

LOOK_S = 3.0  # seconds for the supervisors to describe the work of their ranks
CLOCKS_S = 10.0  # largest difference between the clocks of two nodes
TOGETHER_S = 60.0  # seconds for all ranks to end after one was refused or preempted
END_S = 60.0  # seconds for a supervisor to end its rank
PORTS = range(20000, 32000)  # below the system's range for connections
FINAL = (0, 2, EXIT_PREEMPTED)  # exit codes of a rank that end the launch without a restart
STOPPED = "is stopped"  # a description of a suspended process begins so


@dataclass(frozen=True)
class SupervisorSeat:
    """The place of a supervisor in its launch.

    task: the supervisor's number in this launch
    node, local: the node's number, and the supervisor's number on the node
    host: the node's name
    """

    task: int
    node: int
    local: int
    host: str


@dataclass(frozen=True)
class LaunchPlan:
    """Settings of the coordinator, which are known before supervisors connect.

    run_dir: the run's folder
    tasks: number of supervisors
    spares: number of nodes that wait as spares: the launch's last nodes
    restarts: number of restarts in a row without a newer checkpoint
    """

    run_dir: Path
    tasks: int
    spares: int
    restarts: int


class Coordinator:
    """Decides what all supervisors do next. `out` collects messages as pairs of a task and a message."""

    def __init__(self, plan: LaunchPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.say = say
        self.out: list[tuple[int, Message]] = []
        self.seats: dict[int, SupervisorSeat] = {}  # connected supervisors by task
        self.nodes: list[int] = []  # nodes that train, in the order of their ranks
        self.spares: list[int] = []
        self.lost: list[int] = []  # nodes that were lost since the last start
        self.hosts: dict[int, str] = {}
        self.ranks: dict[int, int] = {}  # task -> rank
        self.generation = -1
        self.state = "joining"  # then running, looking, ending, and over
        self.until = time.monotonic() + JOIN_S  # the end of this state; infinite while running
        self.codes: dict[int, int] = {}  # task -> exit code of its rank
        self.reports: dict[int, Message] = {}  # task -> description of its rank's work
        self.code: int | None = None  # the launch's exit code, once it is over
        self.stop_asked = False
        self.fault: RankFault | None = None
        self.found_at = 0.0
        self.looked_at = 0.0  # the same time as `found_at`, in seconds since 1970
        self.silent_s = 0.0  # seconds without a sign of life from the node that was lost last
        self.node_at_fault: int | None = None  # the node of the last fault
        self.at_fault_again = False  # True if the fault before was on the same node
        self.tries = 0
        self.newest = newest_step(plan.run_dir)
        self.survived_faults: list[RankFault] = []
        self.outcome_before: int | None = None

    @property
    def training(self) -> list[SupervisorSeat]:
        """The connected supervisors that have a rank."""
        return [seat for seat in self.seats.values() if seat.task in self.ranks]

    def receive(self, task: int, message: Message) -> None:
        """Act on a supervisor's message."""
        kind = message["kind"]
        if kind == "hello":
            self._join(SupervisorSeat(task, message["node"], message["local"], message["host"]))
        elif kind == "signal":
            self.stop_asked = True
            if self.state in ("joining", "looking", "ending"):
                self._finish(EXIT_PREEMPTED, "stopped by a signal while no rank was training")
        elif task not in self.seats or message.get("generation") != self.generation:
            return
        elif kind == "ended":
            self._ended(task, message)
        elif kind == "hung" and self.state == "running":
            self._look("hung")
        elif kind == "work":
            self.reports[task] = message
        elif kind == "trained":
            self._trained(message["resumed"])

    def take_messages(self) -> list[tuple[int, Message]]:
        """Return the messages for the supervisors, and forget them."""
        messages = self.out
        self.out = []
        return messages

    def lose(self, task: int, why: str, silent_s: float) -> None:
        """Give up the node of a supervisor whose connection has ended, or was silent for `silent_s` seconds."""
        seat = self.seats.pop(task, None)
        if seat is None or self.state == "over":
            return
        self.say(f"task {task} on {seat.host} is lost: {why}")
        self.silent_s = silent_s
        self._lose_node(seat.node)

    def tick(self, now: float) -> None:
        """Act if time has run out, or if all answers have arrived."""
        if self.state == "joining" and now > self.until:
            self._begin()
        elif self.state == "looking" and (now > self.until or self._all(self.reports)):
            self._end_ranks()
        elif self.state == "ending":
            if now > self.until:
                for seat in [seat for seat in self.training if seat.task not in self.codes]:
                    self.lose(seat.task, f"its rank could not be ended within {END_S:.0f} s", END_S)
            if self._all(self.codes):
                self._start_again(now)
        elif self.state == "running" and now > self.until:
            self._finish(max(self.codes.values()), f"not all ranks ended within {TOGETHER_S:.0f} s")

    def _join(self, seat: SupervisorSeat) -> None:
        self.seats[seat.task] = seat
        self.hosts[seat.node] = seat.host
        if self.state == "joining" and len(self.seats) == self.plan.tasks:
            self._begin()

    def _begin(self) -> None:
        """Divide the nodes into nodes that train and spares, and start the ranks."""
        count = {node: len(self._seats_on(node)) for node in sorted(self.hosts)}
        per_node = max(count.values())
        whole = [node for node in count if count[node] == per_node]
        training = self.plan.tasks // per_node - self.plan.spares
        if len(whole) < training or self.seats[0].node != whole[0]:  # the first task's node has the ranks' store
            missing = self.plan.tasks - len(self.seats)
            self._finish(1, f"{missing} of {self.plan.tasks} supervisors did not connect within {JOIN_S:.0f} s")
            return
        self.nodes = whole[:training]
        self.spares = whole[training:]
        self._start()

    def _start(self) -> None:
        """Start all ranks."""
        self.generation += 1
        self.codes = {}
        self.reports = {}
        self.state = "running"
        self.until = float("inf")
        self.outcome_before = written_at(self.plan.run_dir / OUTCOME)
        order = [seat for node in self.nodes for seat in self._seats_on(node)]
        self.ranks = {seat.task: rank for rank, seat in enumerate(order)}
        resumes = newest_step(self.plan.run_dir) > 0
        port = free_port()
        for seat in order:
            start = {"rank": self.ranks[seat.task], "ranks": len(order), "port": port, "resumes": resumes}
            self.out.append((seat.task, {"kind": "start", "generation": self.generation, **start}))

    def _seats_on(self, node: int) -> list[SupervisorSeat]:
        return sorted((seat for seat in self.seats.values() if seat.node == node), key=lambda seat: seat.local)

    def _all(self, answers: dict[int, Any]) -> bool:
        return all(seat.task in answers for seat in self.training)

    def _ended(self, task: int, message: Message) -> None:
        self.codes[task] = message["code"]
        self.reports[task] = message
        if self.state != "running":
            return
        if message["code"] not in FINAL:
            self._look("ended")
        elif self._all(self.codes):
            self._finish(max(self.codes.values()), "all ranks have ended")
        elif message["code"] != 0:
            self.until = min(self.until, time.monotonic() + TOGETHER_S)

    def _look(self, why: str) -> None:
        """Ask all supervisors for the work of their ranks, to find the rank at fault."""
        self.found_at = time.monotonic()
        self.looked_at = time.time()
        self.state = "looking"
        self.until = self.found_at + LOOK_S
        self.reports = {task: report for task, report in self.reports.items() if task in self.codes}
        for seat in self.training:
            if seat.task not in self.codes:
                self.out.append((seat.task, {"kind": "look", "generation": self.generation, "why": why}))

    def _end_ranks(self) -> None:
        """Name the rank at fault, and end all ranks."""
        self._record_unfinished_restart()
        self.fault = self._cause()
        self._compare_collectives(self.fault)
        self.say(f"FAULT {self.fault.words()}")
        finished = self._outcome().get("outcome") == "finished"
        if finished or self.stop_asked:
            self._finish(1, "training has finished" if finished else "the run was asked to stop")
            return
        self.state = "ending"
        self.until = time.monotonic() + END_S
        for seat in self.training:
            if seat.task not in self.codes:
                self.out.append((seat.task, {"kind": "stop", "generation": self.generation}))

    def _cause(self) -> RankFault:
        """Describe the fault. The rank at fault is the rank that lags behind, unless a process is dead or suspended."""
        reports = {task: report for task, report in self.reports.items() if task in self.ranks}
        step = max((report["step"] for report in reports.values()), default=0)
        if self.lost:
            self.node_at_fault = None
            self.at_fault_again = False
            host = self.hosts[self.lost[0]]
            rank = next((rank for task, rank in self.ranks.items() if task not in self.seats), -1)
            report = next(iter(reports.values()), {})
            return self._fault("lost node", rank, host, "its supervisor is gone", report, step)
        if not reports:
            return self._fault("hung", -1, "", "no supervisor has described its rank", {"elapsed": LOOK_S}, step)
        task = min(reports, key=lambda task: _suspicion(reports[task], self.ranks[task]))
        report = reports[task]
        rank = self.ranks[task]
        code = report.get("code")
        if code is None:
            cause = f"hung in {report['section']}"
            num_pieces = [other["pieces"] for other in reports.values() if "pieces" in other]
            detail = report["fault"] or f"no progress for {report['elapsed']:.1f} s"
            if not report["fault"] and min(num_pieces) == max(num_pieces):
                rank = -1  # all ranks are at the same point
        elif code < 0:
            cause = "killed"
            detail = f"ended by signal {-code}"
        else:
            outcome = self._outcome()
            cause = faults.CORRUPT if outcome.get("corrupt") else "failed"
            rank = outcome.get("rank", rank)
            detail = str(outcome.get("reason", f"exit code {code}"))
            task = next((task for task, its_rank in self.ranks.items() if its_rank == rank), task)
        before = self.node_at_fault
        self.node_at_fault = self._node_of(task, rank)
        self.at_fault_again = before is not None and before == self.node_at_fault
        host = self.seats[task].host if rank >= 0 else ""
        return self._fault(cause, rank, host, detail, report, step)

    def _compare_collectives(self, fault: RankFault) -> None:
        """Add to a hang the first rank whose collectives differ. It is named if the ranks' work names none."""
        if not fault.cause.startswith("hung"):
            return
        divergence = compare_at_hang(self.plan.run_dir / "logs", self.looked_at - CLOCKS_S)
        if divergence is None:
            return
        fault.detail = f"{fault.detail}; {divergence.what}"
        seat = next((seat for seat in self.training if self.ranks[seat.task] == divergence.rank), None)
        if fault.rank < 0 and seat is not None:
            fault.rank = divergence.rank
            fault.host = seat.host

    def _outcome(self) -> dict[str, Any]:
        """Return outcome.json, or {} if it is older than this start of the ranks."""
        path = self.plan.run_dir / OUTCOME
        if written_at(path) == self.outcome_before:
            return {}
        return read_record(path)

    def _node_of(self, task: int, rank: int) -> int | None:
        if rank < 0:
            return None
        return self.seats[task].node

    def _fault(self, cause: str, rank: int, host: str, detail: str, report: Message, step: int) -> RankFault:
        if cause.startswith("hung"):
            found_s = report["elapsed"]
        elif self.lost:
            found_s = self.silent_s
        else:
            found_s = 0.0
        return RankFault(
            time=self.looked_at,
            cause=cause,
            rank=rank,
            host=host,
            detail=detail,
            section=report.get("section", ""),
            doing=report.get("doing", ""),
            limit_s=report.get("limit", 0.0),
            step=step,
            found_s=found_s,
            repeated_s=max((other["step_s"] for other in self.reports.values()), default=0.0),  # of one step
        )

    def _lose_node(self, node: int) -> None:
        """Give up a node, and end its other supervisors."""
        for seat in self._seats_on(node):
            self.out.append((seat.task, {"kind": "end", "code": 1}))
            del self.seats[seat.task]
        if node in self.spares:
            self.spares.remove(node)
            self.say(f"spare node {self.hosts[node]} is lost, {len(self.spares)} are left")
        elif node in self.nodes and node not in self.lost:
            self.lost.append(node)
            if self.state == "running":
                self._look("lost")

    def _start_again(self, now: float) -> None:
        """Start all ranks again, or end the launch if that would be futile."""
        assert self.fault is not None
        newest = newest_step(self.plan.run_dir)
        if newest > self.newest:
            self.tries = 0
        self.newest = newest  # lower than before if checkpoints were renamed after silent corruption
        self.tries += 1
        if self.tries > self.plan.restarts:
            self._finish(1, f"{self.plan.restarts} restarts in a row wrote no newer checkpoint (run.restarts)")
            return
        if self._repeated():
            self._finish(1, "the run failed again in the same way, without a newer checkpoint")
            return
        node = self.node_at_fault
        replaced = self.at_fault_again or self.fault.cause == faults.CORRUPT
        if node is not None and node != self.nodes[0] and replaced and self.spares and not self.lost:
            self.lost.append(node)
        for node in self.lost:
            if not self.spares:
                self._finish(1, f"node {self.hosts[node]} is lost and no spare node is left (cluster.spares)")
                return
            spare = self.spares.pop(0)
            self.nodes[self.nodes.index(node)] = spare
            self.fault.spare = self.hosts[spare]
            self.say(f"spare node {self.hosts[spare]} takes the place of {self.hosts[node]}")
        self.lost = []
        self.fault.restart_s = now - self.found_at
        self.survived_faults.append(self.fault)
        self.say(
            f"restart {self.tries} of {self.plan.restarts} since the checkpoint of step {newest} in the run's folder"
        )
        self._start()

    def _repeated(self) -> bool:
        """Return True if a rank has raised the same error as before the last restart."""
        if self.tries == 1 or self.fault is None or not self.survived_faults:
            return False
        before = self.survived_faults[-1]
        return self.fault.cause == "failed" and (self.fault.detail, self.fault.step) == (before.detail, before.step)

    def _trained(self, resumed: int) -> None:
        """Record the cost of a restart, because the first step after it has ended."""
        if self.fault is None:
            return
        self.fault.resumed = resumed
        self.fault.restart_s = time.monotonic() - self.found_at
        self.fault.repeated_s *= max(0, self.fault.step - resumed)
        self._record(self.fault)
        self.say(f"trains again from step {resumed}; {self.fault.lost_s:.1f} s were lost")
        self.fault = None

    def _record(self, fault: RankFault) -> None:
        try:
            faults.record(self.plan.run_dir, fault)
        except OSError as error:  # a full disk must not end a healthy run
            self.say(f"this fault can't be recorded: {error}")

    def _record_unfinished_restart(self) -> None:
        """Record the last fault if no step has ended since: only its description is known."""
        if self.fault is not None:
            self.fault.repeated_s = 0.0
            self._record(self.fault)

    def _finish(self, code: int, why: str) -> None:
        """End the launch."""
        self.state = "over"
        self.code = code
        self._record_unfinished_restart()
        if self.survived_faults:
            self.say(f"time lost by cause: {faults.words(self.survived_faults)}")
        if self.generation > 0 or code not in FINAL:
            self.say(f"ends with code {code}: {why}")
        self.out += [(task, {"kind": "end", "code": code}) for task in self.seats]


def _suspicion(report: Message, rank: int) -> tuple[int, int, int]:
    """Return a key by which ranks are sorted, the most suspicious first.

    A killed process comes first, then a suspended one, then one that has failed, and then the rank that has begun the
    fewest pieces of work.
    """
    code = report.get("code")
    if code is not None and code < 0:
        kind = 0
    elif code is None and report["fault"]:
        kind = 1
    elif code is not None and code not in FINAL:
        kind = 2
    else:
        kind = 3
    return kind, report.get("pieces", 0), rank


def free_port() -> int:
    """Return a port of this machine on which nobody listens, for the store of the ranks."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
