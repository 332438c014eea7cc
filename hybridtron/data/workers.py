"""Background work: tasks in parallel processes, and an iterator that is read ahead in a thread.

Each worker process receives tasks one at a time through its own pipe, and answers through it. If a worker dies or
fails, the call raises its error. All workers end with the call, or with the process that made it, even if it is killed.
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
    """Yield an iterator's items, while a thread computes the next `ahead` items (reading releases Python's lock)."""
    with ThreadPoolExecutor(1, "prefetched") as thread:
        end = object()
        coming = deque(thread.submit(next, made, end) for _ in range(ahead))
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, made, end))
            yield cast(Message, item)


class WorkerEnded(RuntimeError):
    """Raised when a worker process ends without an answer."""


def side_by_side(
    work: Callable[[Task], Iterable[Message]], tasks: Sequence[Task], workers: int
) -> Iterator[tuple[int, Message | None]]:
    """Run `work` on tasks in parallel; yield (index, message) per message, and (index, None) after each task."""
    if workers == 1 or len(tasks) <= 1:  # in this process
        for place, task in enumerate(tasks):
            yield from ((place, message) for message in work(task))
            yield place, None
        return
    context = multiprocessing.get_context("spawn")  # shares no state, but finds imports in the same places
    crew: dict[Connection, BaseProcess] = {}
    waiting = enumerate(tasks)
    try:
        with unheard({signal.SIGINT}):  # Ctrl-C reaches every process; this one ends the workers
            for _ in range(min(workers, len(tasks))):
                ours, theirs = context.Pipe()
                crew[ours] = context.Process(target=_serve, args=(work, theirs), daemon=True)
                crew[ours].start()
                theirs.close()  # the pipe then closes when the worker ends
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
    """Block signals while processes are started, which then never receive these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the resource tracker inherits this too
    try:
        resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process when its parent ends. A killed parent can't end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _heard(connection: Connection, worker: BaseProcess) -> Any:
    """Receive a worker's message; raise its exception, or WorkerEnded if it died."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        if worker.exitcode == -signal.SIGKILL:
            cause = "as a rule for lack of memory: fewer --workers take less"
        else:
            cause = ""
        raise WorkerEnded(f"a worker ended with exit code {worker.exitcode} {cause}".rstrip()) from None
    if isinstance(message, Exception):
        raise message
    return message


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    """Work on tasks in a worker process, until it is killed."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker uses one thread
    with suppress(EOFError, BrokenPipeError):  # the parent closed the pipe
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
