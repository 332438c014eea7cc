"""Bounded retries: a request to a store always ends, and fails with one kind of error.

A store's client limits each wait for the network but not their number. A store that sends a byte a second would keep
it busy for ever. Each attempt therefore runs in a thread, which is abandoned at its deadline. Python cannot end a
thread: it lives until its own waits end, so an attempt must write only to places that are not read otherwise.
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
PAUSE = 1.0  # maximum seconds before the second attempt; doubled before each later attempt
LONGEST_PAUSE = 20.0


class StorageError(RuntimeError):
    """Raised when a request to a store, or to its cache, fails.

    The message says how often it was tried, and why it failed.
    """


class ObjectMissingError(StorageError):
    """Raised when a store has no object with the requested name."""


class Damaged(Exception):
    """Raised when a file's bytes differ from those stored. The message is a predicate, such as "has 5 of 10 bytes"."""


@dataclass(frozen=True)
class Patience:
    """Retry policy: how long an attempt may take, and how often it is repeated.

    timeout: seconds for a small request, and for each wait for the network
    retries: attempts after the first
    slowest: minimum transfer rate in bytes per second, which extends the timeout for a large file
    """

    timeout: float = 60.0
    retries: int = 2
    slowest: int = 2**20

    def deadline(self, size: int) -> float:
        """Return the seconds that one attempt may take to move `size` bytes."""
        return max(self.timeout, size / self.slowest)

    def pause(self, number: int) -> float:
        """Return the maximum pause in seconds after attempt `number`, which counts from 1.

        The maximum doubles with each attempt, up to LONGEST_PAUSE or a quarter of the timeout.
        """
        return min(PAUSE * 2 ** (number - 1), LONGEST_PAUSE, self.timeout / 4)

    def total(self, size: int) -> float:
        """Return the seconds that all attempts and pauses may take together. Others wait that long for the outcome."""
        pauses = sum(self.pause(number) for number in range(1, self.retries + 1))
        return (self.retries + 1) * self.deadline(size) + pauses


def attempted(patience: Patience, size: int, what: str, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it succeeds, and return its result; raise StorageError after the last failure.

    size: bytes that an attempt moves, for its deadline
    what: a participle for the message, such as "fetched"

    A StorageError, a missing package, a missing file or a refused permission is not retried. A missing file raises
    ObjectMissingError.
    """
    begin = time.monotonic()
    for number in range(1, patience.retries + 2):
        try:
            return bounded(patience.deadline(size), attempt)
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
        # Random, because processes that were refused together would otherwise retry together.
        time.sleep(patience.pause(number) * random.SystemRandom().uniform(0.5, 1))
    raise AssertionError("at least one attempt is made")


def bounded(seconds: float, attempt: Callable[[], Result]) -> Result:
    """Run `attempt` in a thread and return its result; raise TimeoutError after `seconds`.

    After a timeout the thread is abandoned, not stopped.
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
        return f"what came {error}"
    if isinstance(error, (ImportError, FileNotFoundError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
