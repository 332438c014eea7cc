"""Run a function on n processes of this machine, which talk over gloo: layouts without a cluster, a GPU or a launcher.

They are forked from a server that has imported torch and megatron-core once, and fork again for every job: what a job
leaves behind (groups, threads, settings) is gone with its process, and nothing is torn down that could fail in that.
A job that fails raises the traceback of the process that failed first, and its processes are replaced.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.parallel import groups
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.rendezvous import LOOPBACK

GRACE_S = 3.0  # what the others of a failed job get to fail too
START_S = 120.0  # what new processes get to import what they need


class WorkerError(RuntimeError):
    """A job failed; the text ends in the traceback of its process."""


@dataclass(frozen=True)
class Seat:
    """A process's place in a job: what its function gets as its first argument."""

    rank: int
    world_size: int
    meeting_file: str
    gpu: str = ""  # the one that the process sees, as CUDA_VISIBLE_DEVICES names it

    @contextmanager
    def groups(self, parallel: ParallelConfig) -> Iterator[Groups]:
        """The groups of a layout over the processes of this job, in the context that megatron-core needs.

        They end with the process, and not before.
        """
        with megatron_context():
            yield groups.start(parallel, f"file://{self.meeting_file}", ProcessLaunch(self.rank, self.world_size))


@dataclass
class _Worker:
    process: Any
    connection: Connection


class Pool:
    """Processes that are started when a job first needs them, and stopped by `close`.

    With names of GPUs each process of a job has one of them, and they talk over NCCL.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self.gpus = gpus
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["hybridtron.parallel.quiet", "hybridtron.parallel.pool", "hybridtron.engine.engine"]
        )
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        """`function(seat, *arguments)` on every process, which must find it by its module; the results by rank."""
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        self._start(world_size - len(self._workers))
        try:
            with tempfile.TemporaryDirectory(prefix="hybridtron-") as folder:
                for rank, worker in enumerate(self._workers[:world_size]):
                    seat = Seat(rank, world_size, f"{folder}/meeting", self.gpus[rank] if self.gpus else "")
                    job = (function, seat, arguments)
                    worker.connection.send_bytes(pickle.dumps(job))
                results = _collect(self._workers[:world_size], time.monotonic() + timeout_s)
        except BaseException:
            self._stop(world_size)
            raise
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._stop(len(self._workers))

    def _start(self, count: int) -> None:
        """Add `count` workers, and wait until they have imported what they need."""
        new = []
        for _ in range(count):
            ours, theirs = mp.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            new.append(_Worker(process, ours))
        self._workers += new
        for worker in new:
            if not worker.connection.poll(START_S):
                raise WorkerError(f"a process did not start within {START_S:.0f} s")
            worker.connection.recv_bytes()

    def _stop(self, count: int) -> None:
        for worker in self._workers[:count]:
            worker.connection.close()
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # with the job that it may have under way
            worker.process.join()
        self._workers = self._workers[count:]


def _collect(job: list[_Worker], deadline: float) -> dict[int, Any]:
    """The results by rank. Raises the first failure: an exception, a death, or too little time."""
    results: dict[int, Any] = {}
    failure = None
    waiting = {worker.connection: rank for rank, worker in enumerate(job)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerError(failure or f"ranks {sorted(waiting.values())} did not finish in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                done, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                done, value = False, "the process died"
            if done:
                results[rank] = value
            elif failure is None:
                failure = f"rank {rank}: {value}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failure:
        raise WorkerError(failure)
    return results


def _serve(connection: Connection) -> None:
    """A worker's life: one job after another, each in a process of its own, until the pool goes."""
    os.setpgid(0, 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    faulthandler.enable()  # a process that dies of a signal says where
    connection.send_bytes(b"ready")
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, seat, arguments = pickle.loads(job)
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        child = os.fork()
        if child == 0:
            _do(connection, function, seat, arguments)
        if os.waitpid(child, 0)[1] != 0:
            connection.send_bytes(pickle.dumps((False, "the process died")))


def _do(connection: Connection, function: Callable[..., Any], seat: Seat, arguments: tuple[Any, ...]) -> NoReturn:
    """A job's process: it answers, and ends without tearing anything down."""
    # The fork has left torch's thread pool without its threads, and the next call replaces it. Several threads that
    # call at once, as those that write a checkpoint do, may find none ("Invalid thread pool!"): call from here first.
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = seat.gpu  # read when a process first asks for a device
    try:
        answer = pickle.dumps((True, function(seat, *arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
