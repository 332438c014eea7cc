"""Events of the current rehearsal which torch's operations do not show: waits, copies, other packages' kernels.

Listeners are stored in a module variable, because torch runs the backward pass on its own threads, where context
variables are not visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """Receiver of events; the census is one."""

    def wait(self, kind: str) -> None:
        """Handle a wait at the current line: the host waits for the device, or a stream for another stream."""

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        """Handle another package's kernel, with its bytes and FLOPs."""

    @property
    def copies(self) -> Sequence[object]:
        """Asynchronous copies between host and device so far."""

    def arrived(self, copies: range) -> None:
        """Handle a wait of all later computation for these copies, given by their index in `copies`."""


_listening: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send events to this listener inside the context."""
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)


def waits(kind: str) -> None:
    """Report a wait to all listeners."""
    for listener in _listening:
        listener.wait(kind)


def copied() -> int:
    """Count the asynchronous copies between host and device so far."""
    return sum(len(listener.copies) for listener in _listening)


def arrived(copies: range) -> None:
    """Report that all computation from now on waits for these copies."""
    for listener in _listening:
        listener.arrived(copies)


def runs(name: str, moved: int, flops: int, kind: str) -> None:
    """Report another package's kernel; `kind` is that of the census's `Operation`."""
    for listener in _listening:
        listener.add(name, moved, flops, kind)
