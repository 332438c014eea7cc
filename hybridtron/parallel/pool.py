"""Run a function on n processes of this machine that talk over gloo: layouts without a cluster, a GPU or a launcher.

They are forked from a server that has imported torch and megatron-core once, and serve job after job. A job that
fails raises the traceback of the process that failed first, and its processes are replaced.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.parallel import groups
from hybridtron.parallel.groups import Groups, Launch

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

    @contextmanager
    def groups(self, parallel: ParallelConfig) -> Iterator[Groups]:
        """The groups of a layout over the processes of this job, in the context that megatron-core needs."""
        with megatron_context():
            try:
                yield groups.start(parallel, f"file://{self.meeting_file}", Launch(self.rank, self.world_size))
            finally:
                groups.stop()


@dataclass
class _Worker:
    process: Any
    connection: Connection


class Pool:
    """Processes that are started when a job first needs them, and stopped by `close`."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["hybridtron.parallel.pool", "hybridtron.engine.engine"])
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        """`function(seat, *arguments)` on every process, which must find it by its module; the results by rank."""
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        self._start(world_size - len(self._workers))
        try:
            with tempfile.TemporaryDirectory(prefix="hybridtron-") as folder:
                for rank, worker in enumerate(self._workers[:world_size]):
                    job = (function, Seat(rank, world_size, f"{folder}/meeting"), arguments)
                    worker.connection.send_bytes(pickle.dumps(job))
                results = _collect(self._workers[:world_size], time.monotonic() + timeout_s)
        except BaseException:
            self._stop(world_size)
            raise
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._stop(len(self._workers))

    def _start(self, count: int) -> None:
        """Add so many workers, and wait until they have imported what they need."""
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
            worker.process.kill()
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
    """A worker's life: one job after another, one thread, no GPU, until the pool goes."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
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
            answer = pickle.dumps((True, function(seat, *arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
