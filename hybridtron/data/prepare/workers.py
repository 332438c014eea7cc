"""Parts of a folder written side by side, each worker a process with one tokenizer and one thread.

Workers are handed part numbers one at a time over a pipe of their own and answer on it. A worker that dies or fails
ends the call, with what it said; all workers end with the call, or with the process that made it, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from hybridtron.data.prepare.input_files import PrepareError
from hybridtron.data.prepare.parts import Advance, PrepareJob, write_part


class PrepareWorkerError(PrepareError):
    """A worker that ended without a word."""


class _Advanced(NamedTuple):
    size: int
    tokens: int


class _Failed(NamedTuple):
    message: str
    expected: bool


def write_parts(
    job: PrepareJob, numbers: Sequence[int], workers: int, advance: Advance, done: Callable[[int], None]
) -> None:
    """Write these parts; `done` is called with each as it is finished. One worker is this process itself."""
    if workers > 1 and len(numbers) > 1:
        _by_processes(job, numbers, min(workers, len(numbers)), advance, done)
        return
    tokenizer = job.vocabulary.tokenizer()
    for number in numbers:
        write_part(job, number, tokenizer, advance)
        done(number)


def _by_processes(
    job: PrepareJob, numbers: Sequence[int], workers: int, advance: Advance, done: Callable[[int], None]
) -> None:
    context = multiprocessing.get_context("spawn")  # nothing is shared, and imports are found where they are here
    crew: dict[Connection, BaseProcess] = {}
    waiting = iter(numbers)
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(job, theirs), daemon=True)
            _start(worker)
            theirs.close()  # so that the pipe ends with the worker
            crew[ours] = worker
            ours.send(next(waiting))
        working = len(crew)
        while working:
            ready = wait(list(crew))
            for connection in [connection for connection in crew if connection in ready]:
                message = _heard(connection, crew)
                if isinstance(message, _Advanced):
                    advance(*message)
                    continue
                done(message)
                working -= (following := next(waiting, None)) is None
                if following is not None:
                    connection.send(following)
    finally:
        for connection, worker in crew.items():
            worker.terminate()
            worker.join()
            connection.close()


def _start(worker: BaseProcess) -> None:
    """Ctrl-C reaches every process of a terminal: workers inherit not to hear it, and are ended by the first one."""
    resource_tracker.ensure_running()  # which unblocks signals when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard(connection: Connection, crew: dict[Connection, BaseProcess]) -> _Advanced | int:
    """A worker's message; raises what it failed of."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        worker = crew[connection]
        worker.join()
        cause = "as a rule for lack of memory: fewer --workers take less" if worker.exitcode == -signal.SIGKILL else ""
        raise PrepareWorkerError(f"a worker ended with exit code {worker.exitcode} {cause}".rstrip()) from None
    if isinstance(message, _Failed):
        raise PrepareError(message.message) if message.expected else PrepareWorkerError(message.message)
    return message


def _serve(job: PrepareJob, connection: Connection) -> None:
    """What a worker does until it is ended."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # nobody listens any more
        try:
            tokenizer = job.vocabulary.tokenizer()
            while True:
                number = connection.recv()
                write_part(job, number, tokenizer, lambda size, tokens: connection.send(_Advanced(size, tokens)))
                connection.send(number)
        except EOFError:
            raise
        except (PrepareError, OSError) as error:
            connection.send(_Failed(str(error), True))
        except Exception:
            connection.send(_Failed(f"a worker failed:\n{traceback.format_exc()}", False))


def _end_with_parent() -> None:
    """Killed, the first process can't end its workers, which must not write beside those of the next call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
