"""Work beside that of a process: tasks side by side in others, what is needed next in a thread of its own.

Workers are handed tasks one at a time over a pipe of their own and answer on it. A worker that dies or fails ends the
call, with what it said; all workers end with the call, or with the process that made it, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

Task = TypeVar("Task")
Message = TypeVar("Message")


def prefetched(made: Iterator[Message], ahead: int = 1) -> Iterator[Message]:
    """What an iterator gives; while one is used, the next are made in a thread (reading leaves Python's lock)."""
    with ThreadPoolExecutor(1, "prefetched") as thread:
        end = object()
        coming = deque(thread.submit(next, made, end) for _ in range(ahead))
        while (one := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, made, end))
            yield cast(Message, one)


class WorkerEnded(RuntimeError):
    """A worker that ended without a word."""


def side_by_side(
    work: Callable[[Task], Iterable[Message]], tasks: Sequence[Task], workers: int
) -> Iterator[tuple[int, Message | None]]:
    """What `work` yields for each task, with the task's place, and then None. One worker is this process itself."""
    if workers == 1 or len(tasks) <= 1:
        for place, task in enumerate(tasks):
            yield from ((place, message) for message in work(task))
            yield place, None
        return
    context = multiprocessing.get_context("spawn")  # nothing is shared, and imports are found where they are here
    crew: dict[Connection, BaseProcess] = {}
    waiting = enumerate(tasks)
    try:
        with unheard({signal.SIGINT}):  # it reaches every process of a terminal; workers are ended by the first one
            for _ in range(min(workers, len(tasks))):
                ours, theirs = context.Pipe()
                crew[ours] = context.Process(target=_serve, args=(work, theirs), daemon=True)
                crew[ours].start()
                theirs.close()  # so that the pipe ends with the worker
        for connection, following in zip(crew, waiting, strict=False):
            connection.send(following)
        working = len(crew)
        while working:
            for connection in wait(list(crew)):
                assert isinstance(connection, Connection)
                place, message = _heard(connection, crew[connection])
                yield place, message
                if message is None:
                    working -= (following := next(waiting, None)) is None
                    if following is not None:
                        connection.send(following)
    finally:
        for connection, worker in crew.items():
            worker.kill()
            worker.join()
            connection.close()


@contextmanager
def unheard(signals: Collection[signal.Signals]) -> Iterator[None]:
    """A time in which processes are started that never hear these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # which the tracker inherits too
    try:
        resource_tracker.ensure_running()  # this unblocks two of them
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process with the one that started it, which may be killed, and can't end it then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _heard(connection: Connection, worker: BaseProcess) -> Any:
    """A worker's message; raises what it failed of."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        cause = "as a rule for lack of memory: fewer --workers take less" if worker.exitcode == -signal.SIGKILL else ""
        raise WorkerEnded(f"a worker ended with exit code {worker.exitcode} {cause}".rstrip()) from None
    if isinstance(message, Exception):
        raise message
    return message


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    """What a worker does until it is ended."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread
    with suppress(EOFError, BrokenPipeError):  # nobody listens any more
        while True:
            place, task = connection.recv()
            try:
                for message in work(task):
                    connection.send((place, message))
            except Exception as error:
                error.add_note(f"In a worker:\n{traceback.format_exc()}")
                connection.send(error)
            else:
                connection.send((place, None))
