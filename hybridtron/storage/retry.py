"""Repeat failed requests to a store, with a time limit for each attempt; raise StorageError after the last failure.

A store's client limits each wait for the network, but not the number of waits. So a store that sends one byte per
second could keep a client busy for ever. For this reason each attempt runs in a thread, and the caller stops waiting
for the thread at a deadline. Python can't end a thread: an abandoned thread continues, and may still write to its
files. Therefore each attempt must write to its own files, which no later attempt reads.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
PAUSE = 1.0  # maximum pause in seconds before the second attempt; doubled for each later attempt
MAX_PAUSE = 20.0  # maximum pause in seconds before any attempt


class StorageError(RuntimeError):
    """Raised when a file can't be read from a store or the cache, or can't be written to it."""


class ObjectMissingError(StorageError):
    """Raised when a store has no object with the requested name."""


class Damaged(Exception):
    """Raised when a file's size or digest is wrong, or when the file can't be decompressed.

    The message continues a sentence after the file's name, such as "has 5 of 10 bytes".
    """


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy: how long an attempt may take, and how often it is repeated.

    timeout: seconds for an attempt that transfers few bytes, and for each wait for the network
    retries: number of attempts after the first
    slowest: transfer rate in bytes per second; an attempt with a large file may take as long as a transfer at this rate
    """

    timeout: float = 60.0
    retries: int = 2
    slowest: int = 2**20

    def deadline(self, size: int) -> float:
        """Return the seconds that one attempt may take to transfer `size` bytes."""
        return max(self.timeout, size / self.slowest)

    def pause(self, number: int) -> float:
        """Return the maximum pause in seconds after attempt `number`, which counts from 1.

        The maximum doubles with each attempt, up to the smaller of MAX_PAUSE and a quarter of the timeout.
        """
        return min(PAUSE * 2 ** (number - 1), MAX_PAUSE, self.timeout / 4)

    def total(self, size: int) -> float:
        """Return the seconds that all attempts and pauses may take together, for a file of `size` bytes.

        While one process fetches a file, other processes that need the file derive their waiting time from this total.
        """
        pauses = sum(self.pause(number) for number in range(1, self.retries + 1))
        return (self.retries + 1) * self.deadline(size) + pauses


def with_retries(patience: RetryPolicy, size: int, what: str, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it succeeds, and return its result; raise StorageError after the last failure.

    size: number of bytes that an attempt transfers; an attempt's deadline depends on this size
    what: participle for the message, such as "fetched"

    If `attempt` raises StorageError, ImportError, FileNotFoundError or PermissionError, there is no further attempt.
    A StorageError is raised unchanged, and FileNotFoundError becomes ObjectMissingError.
    """
    begin = time.monotonic()
    for number in range(1, patience.retries + 2):
        try:
            return run_bounded(patience.deadline(size), attempt)
        except StorageError:
            raise
        except Exception as error:
            final = isinstance(error, (ImportError, FileNotFoundError, PermissionError))
            if final or number == patience.retries + 1:
                took = f"{number} {'attempts' if number > 1 else 'attempt'}, {time.monotonic() - begin:.1f} s"
                if isinstance(error, FileNotFoundError):
                    error_class = ObjectMissingError
                else:
                    error_class = StorageError
                raise error_class(f"can't be {what} ({took}): {_described(error)}") from error
        # The pause is random: processes that were refused at the same time shall not retry at the same time.
        time.sleep(patience.pause(number) * random.SystemRandom().uniform(0.5, 1))
    raise AssertionError("at least one attempt is made")


def run_bounded(seconds: float, attempt: Callable[[], Result]) -> Result:
    """Run `attempt` in a thread and return its result; raise TimeoutError if it takes longer than `seconds`.

    After a timeout the thread continues in the background.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="storage", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise TimeoutError(f"not finished after {seconds:g} s") from error


def _described(error: Exception) -> str:
    if isinstance(error, Damaged):
        return f"the received file {error}"
    if isinstance(error, (ImportError, FileNotFoundError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
