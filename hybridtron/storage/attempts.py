"""Bounded attempts: whatever a store does, a request to it ends, and ends in one kind of error.

Clients of stores bound one wait for the network, not the number of waits: a store that sends a byte a second would be
listened to for ever. So every attempt runs in a thread of its own, which is abandoned when its time is over; what such
a thread still writes must lie where nobody looks. Python can't end a thread, so it stays until its own waits end.
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
PAUSE = 1.0  # seconds before the second attempt; at most twice as many before each that follows
LONGEST_PAUSE = 20.0


class StorageError(RuntimeError):
    """A request to a store, or to the cache of one, failed. The text says what was tried, for how long, and why."""


class ObjectMissingError(StorageError):
    """There is nothing of that name in the store."""


class Damaged(Exception):
    """What is wrong with a file's bytes: they are not the ones that were stored."""


@dataclass(frozen=True)
class Patience:
    """How long an attempt may take, and how often it is repeated.

    timeout: seconds for a small request, and for each wait for the network
    retries: attempts after the first one
    slowest: bytes per second at which a large file may take longer than the timeout
    """

    timeout: float = 60.0
    retries: int = 2
    slowest: int = 2**20

    def deadline(self, size: int) -> float:
        """Seconds that one attempt may take to move `size` bytes."""
        return max(self.timeout, size / self.slowest)

    def pause(self, number: int) -> float:
        """Seconds, at most, before the attempt that follows the first `number`: short ones where the timeout is."""
        return min(PAUSE * 2 ** (number - 1), LONGEST_PAUSE, self.timeout / 4)

    def total(self, size: int) -> float:
        """Seconds that all attempts may take together, which is what others wait for them."""
        pauses = sum(self.pause(number) for number in range(1, self.retries + 1))
        return (self.retries + 1) * self.deadline(size) + pauses


def attempted(patience: Patience, size: int, what: str, attempt: Callable[[], Result]) -> Result:
    """What an attempt gives, made again while its failure may pass; StorageError says what the last failure was.

    `size` is the bytes that it moves, `what` the verb of the message, such as "fetched". A StorageError of the
    attempt itself is final.
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
                kind = ObjectMissingError if isinstance(error, FileNotFoundError) else StorageError
                raise kind(f"can't be {what} ({took}): {_described(error)}") from error
        # Processes that were refused together would otherwise come back together.
        time.sleep(patience.pause(number) * random.SystemRandom().uniform(0.5, 1))
    raise AssertionError("at least one attempt is made")


def bounded(seconds: float, attempt: Callable[[], Result]) -> Result:
    """What an attempt gives, or TimeoutError; then it continues in a thread for which nobody waits."""
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
    return str(error) if isinstance(error, (ImportError, FileNotFoundError)) else f"{type(error).__name__}: {error}"
