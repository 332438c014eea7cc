"""Events in the current rehearsal that torch's operations do not show: waits, copies, other packages' kernels.

A rehearsal simulates a training step without a GPU. It replaces CUDA functions and other packages' functions. The
replacements report events by calling the `report_*` functions below. The step's record (`census.py`) is the listener
that gets these events.

Listeners are stored in a module variable. Context variables would not be visible in the backward pass, which torch runs
on its own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Listener(Protocol):
    """Receiver of events, such as `census.Census`."""

    def wait(self, kind: str) -> None:
        """Handle a wait at the current line: the host waits for the device, or a stream waits for another stream."""

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        """Handle the launch of another package's kernel, which reads and writes `moved` bytes."""

    @property
    def copies(self) -> Sequence[object]:
        """All asynchronous copies between host and device so far."""

    def arrived(self, copies: range) -> None:
        """Record that all later computation waits for the copies with these indices in the property `copies`."""


_listening: list[Listener] = []


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send events to this listener while the block runs."""
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)


def report_wait(kind: str) -> None:
    """Report a wait to all listeners."""
    for listener in _listening:
        listener.wait(kind)


def count_copies() -> int:
    """Return the number of asynchronous copies between host and device so far."""
    return sum(len(listener.copies) for listener in _listening)


def report_arrival(copies: range) -> None:
    """Report that all later computation waits for the copies with these indices."""
    for listener in _listening:
        listener.arrived(copies)


def report_kernel(name: str, moved: int, flops: int, kind: str) -> None:
    """Report the launch of another package's kernel. `kind` is a kind of `census.Operation`: for example, "product"."""
    for listener in _listening:
        listener.add(name, moved, flops, kind)


Note = Callable[[str, Mapping[str, Any]], None]
_noting: list[Note] = []


@contextmanager
def noted_calls(note: Note) -> Iterator[None]:
    """Call `note` with the name and the arguments of each call to another package, while the block runs."""
    _noting.append(note)
    try:
        yield
    finally:
        _noting.remove(note)


def report_call(name: str, arguments: Mapping[str, Any]) -> None:
    """Report a call to another package's function, with its arguments by name."""
    for note in _noting:
        note(name, arguments)
