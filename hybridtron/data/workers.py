"""Background work: `side_by_side` runs tasks in worker processes, and `prefetched` reads an iterator ahead in a thread.

A worker process receives one task at a time through its own pipe, and sends messages and a final None through the same
pipe. If a worker dies or raises an exception, `side_by_side` raises an exception. All workers end when `side_by_side`
ends, and when the calling process ends or is killed.
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


def prefetched(messages: Iterator[Message], ahead: int = 1) -> Iterator[Message]:
    """Yield an iterator's items, while a thread computes the next `ahead` items.

    The thread runs in parallel to the caller because reading files releases Python's global interpreter lock.
    """
    with ThreadPoolExecutor(1, "prefetched") as thread:
        end = object()
        coming = deque(thread.submit(next, messages, end) for _ in range(ahead))
        while (item := coming.popleft().result()) is not end:
            coming.append(thread.submit(next, messages, end))
            yield cast(Message, item)


class WorkerEnded(RuntimeError):
    """Raised when a worker process ends before it has finished its task."""


def side_by_side(
    work: Callable[[Task], Iterable[Message]], tasks: Sequence[Task], workers: int
) -> Iterator[tuple[int, Message | None]]:
    """Run `work` on tasks in parallel, and yield the messages that `work` yields.

    Each message is yielded with the index of its task. (index, None) is yielded when a task is finished. With one
    worker or one task, no process is started.
    """
    if workers == 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            yield from ((index, message) for message in work(task))
            yield index, None
        return
    context = multiprocessing.get_context("spawn")  # workers share nothing with this process except its `sys.path`
    crew: dict[Connection, BaseProcess] = {}
    waiting = enumerate(tasks)
    try:
        with unheard({signal.SIGINT}):  # Ctrl-C reaches only this process, which then ends the workers
            for _ in range(min(workers, len(tasks))):
                connection_here, connection_there = context.Pipe()
                crew[connection_here] = context.Process(target=_serve, args=(work, connection_there), daemon=True)
                crew[connection_here].start()
                connection_there.close()  # now only the worker holds this end, so `recv` fails if the worker dies
        for connection, following in zip(crew, waiting, strict=False):
            connection.send(following)
        working = len(crew)
        while working:
            for connection in wait(list(crew)):
                assert isinstance(connection, Connection)
                index, message = _heard(connection, crew[connection])
                yield index, message
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
    """Block signals while processes are started. These processes inherit the mask, so they never get the signals."""
    # The mask is set before the resource tracker starts, because the tracker inherits the mask too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM in this process, so block them again
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Start a thread that ends this process when the parent ends. A parent that is killed does not end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _heard(connection: Connection, worker: BaseProcess) -> Any:
    """Receive a worker's message; raise the worker's exception, or WorkerEnded if the worker died."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        if worker.exitcode == -signal.SIGKILL:
            cause = "(killed, usually for lack of memory; set fewer --workers)"
        else:
            cause = ""
        raise WorkerEnded(f"a worker process ended with exit code {worker.exitcode} {cause}".rstrip()) from None
    if isinstance(message, Exception):
        raise message
    return message


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    """Receive tasks and send messages, in a worker process that runs until it is killed."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker uses one thread
    with suppress(EOFError, BrokenPipeError):  # raised when the parent has closed the pipe
        while True:
            index, task = connection.recv()
            try:
                for message in work(task):
                    connection.send((index, message))
            except Exception as error:
                error.add_note(f"In a worker:\n{traceback.format_exc()}")
                connection.send(error)
            else:
                connection.send((index, None))
