"""Runs a function on several processes on this machine, to use parallel layouts without torchrun.

Worker processes are forked from a server process, which has imported torch and megatron-core once. To run a job, each
worker forks a child process. The child runs the job's function and exits, so that its process groups, threads and
settings need no teardown. If a job fails, `Pool.run` raises WorkerError with the first failed process's traceback, and
the job's workers are killed.
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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.parallel import groups
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.rendezvous import LOOPBACK

GRACE_S = 3.0  # after a process has failed, seconds until the job's other processes are killed
START_S = 120.0  # seconds in which a new worker must be ready for jobs
STOP_S = 30.0  # seconds in which killed workers must end


class WorkerError(RuntimeError):
    """Raised when a job fails; if a process raised an exception, the message ends with its traceback."""


@dataclass(frozen=True)
class Seat:
    """A process's rank and device in a job; the first argument of the job's function."""

    rank: int
    world_size: int
    meeting_file: str  # file through which torch.distributed connects the job's processes
    gpu: str = ""  # value of CUDA_VISIBLE_DEVICES

    @contextmanager
    def groups(self, parallel: ParallelConfig) -> Iterator[Groups]:
        """Form a layout's process groups from all processes in this job; the block runs in `megatron_context`.

        The groups exist until the process ends.
        """
        with megatron_context():
            yield groups.start(parallel, f"file://{self.meeting_file}", ProcessLaunch(self.rank, self.world_size))


@dataclass
class _Worker:
    process: Any
    connection: Connection


class Pool:
    """Worker processes for jobs. They are started when a job needs them, and run until `close` is called.

    `gpus` has a GPU for each rank, as a value of CUDA_VISIBLE_DEVICES. With `gpus` the processes in a job communicate
    over NCCL. If `gpus` is empty, they have no GPU and communicate over gloo.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self.gpus = gpus
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["hybridtron.parallel.quiet", "hybridtron.parallel.pool", "hybridtron.engine.engine"]
        )
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        """Run `function(seat, *arguments)` on `world_size` processes, and return the results by rank.

        The function must be importable, because it is pickled by name. Raises WorkerError if a process fails or dies,
        or if the job takes longer than `timeout_s` seconds.
        """
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        try:
            self._start(world_size - len(self._workers))
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
        """Kill all workers."""
        self._stop(len(self._workers))

    def _start(self, count: int) -> None:
        """Start `count` workers, and wait until they have imported their modules."""
        new = []
        for _ in range(count):
            ours, theirs = mp.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            worker = _Worker(process, ours)
            new.append(worker)
            self._workers.append(worker)
        for worker in new:
            if not worker.connection.poll(START_S):
                raise WorkerError(f"a process did not start within {START_S:.0f} s")
            worker.connection.recv_bytes()

    def _stop(self, count: int) -> None:
        """Kill the first `count` workers and their child processes; warn if a worker is alive STOP_S seconds later."""
        stopped = self._workers[:count]
        self._workers = self._workers[count:]
        for worker in stopped:
            worker.connection.close()
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # the process group includes a running job's child
            worker.process.kill()  # a worker that is still starting has no process group yet
        deadline = time.monotonic() + STOP_S
        for worker in stopped:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                warnings.warn(f"process {worker.process.pid} is alive {STOP_S:.0f} s after SIGKILL", stacklevel=2)


def _collect(job: list[_Worker], deadline: float) -> dict[int, Any]:
    """Wait for the results that a job's workers send, and return them by rank.

    `deadline` is in seconds on the monotonic clock. Raises WorkerError if a process raises an exception or dies, or if
    the deadline has passed.
    """
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
                success, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                success = False
                value = "the process died"
            if success:
                results[rank] = value
            elif failure is None:
                failure = f"rank {rank}: {value}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failure:
        raise WorkerError(failure)
    return results


def _serve(connection: Connection) -> None:
    """Run jobs in this worker until the pool closes the connection; each job runs in a child process."""
    os.setpgid(0, 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    faulthandler.enable()  # print a traceback if a signal kills the process
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
    """Run one job in a child process, send the result or the traceback, and exit without teardown."""
    # After a fork, torch's thread pool has no threads, and the next torch call creates a new pool. If several threads
    # make this call at once, as checkpoint writers do, one of them may find no pool ("Invalid thread pool!"). So this
    # thread makes the first call.
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = seat.gpu  # read at the first use of a device
    try:
        answer = pickle.dumps((True, function(seat, *arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
