"""Which tensors exist on the device at every moment of a step, and what made them.

A storage is born with the first tensor seen on it and dies when the last one is gone, on whatever thread. What is kept
is the list of births and deaths in order, from which the sum at every moment follows, and what it consists of.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor


@dataclass(frozen=True)
class Held:
    """A storage: its bytes, the line that made it, and the part of the step in which that was."""

    bytes: int
    place: str
    part: str


@dataclass
class LiveMemory:
    """Births and deaths, in order."""

    events: list[tuple[int, bool]] = field(default_factory=list)  # a storage's number, and whether it is born
    storages: list[Held] = field(default_factory=list)
    current: int = 0
    _known: dict[int, weakref.ref[object]] = field(default_factory=dict)

    def note(self, tensor: Tensor, place: str, part: str) -> None:
        """A tensor has been seen."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        number = len(self.storages)
        self.storages.append(Held(storage.nbytes(), place, part))
        self.events.append((number, True))
        self.current += storage.nbytes()
        self._known[key] = weakref.ref(storage, partial(self._died, number, key))

    def _died(self, number: int, key: int, _: object) -> None:
        self.events.append((number, False))
        self.current -= self.storages[number].bytes
        del self._known[key]

    def course(self, start: int = 0) -> list[int]:
        """Bytes after each event from the one with this number on."""
        total, course = 0, []
        for index, (number, born) in enumerate(self.events):
            total += self.storages[number].bytes if born else -self.storages[number].bytes
            if index >= start:
                course.append(total)
        return course

    def at_peak(self, start: int = 0) -> Counter[tuple[str, str]]:
        """Bytes by (part, place) at the moment, from this event on, at which most are held."""
        course = self.course(start)
        last = start + max(range(len(course)), key=course.__getitem__)
        living: dict[int, None] = {}
        for number, born in self.events[: last + 1]:
            if born:
                living[number] = None
            else:
                del living[number]
        found: Counter[tuple[str, str]] = Counter()
        for number in living:
            held = self.storages[number]
            found[held.part, held.place] += held.bytes
        return found
