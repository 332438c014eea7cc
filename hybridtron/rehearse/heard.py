"""The one rehearsal under way in this process, which hears of what torch's operations do not show.

It is kept in the module, as torch runs the backward pass on threads of its own, where no context variable is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """What counts a step."""

    def wait(self, kind: str) -> None:
        """The line that runs makes the host wait for the device, or a stream for another."""

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        """A kernel runs: its bytes and FLOPs."""

    @property
    def copies(self) -> Sequence[object]:
        """Those between host and device that ran beside what is computed."""

    def arrived(self, copies: range) -> None:
        """What is computed from now on waits for these of them."""


_listening: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, this one hears."""
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)


def waits(kind: str) -> None:
    """Report a wait."""
    for listener in _listening:
        listener.wait(kind)


def copied() -> int:
    """How many copies between host and device were asked for."""
    return sum(len(listener.copies) for listener in _listening)


def arrived(copies: range) -> None:
    """Report that these copies are waited for."""
    for listener in _listening:
        listener.arrived(copies)


def runs(name: str, moved: int, flops: int, kind: str) -> None:
    """Report a kernel of another package; `kind` as of an operation of the census."""
    for listener in _listening:
        listener.add(name, moved, flops, kind)
