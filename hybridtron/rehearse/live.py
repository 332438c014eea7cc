"""Memory timeline of a step: when tensors on the device are allocated and freed, and by which lines.

A storage's life begins with the first tensor seen on it and ends when the last one is gone, on any thread. The list of
these changes in order gives the total at every moment, and its division among allocation sites.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate

from torch import Tensor

Holder = tuple[str, str]
"""Allocation site: a part of the step, and the line that allocates a tensor in it."""


@dataclass(frozen=True)
class Change:
    """Bytes gained or lost by an allocation site, when `moment` operations have been counted."""

    moment: int
    holder: Holder
    bytes: int


@dataclass(frozen=True)
class Course:
    """Memory timeline for a part of a step: each allocation site's bytes before it, and the changes in order."""

    before: Counter[Holder]
    changes: list[Change]

    @cached_property
    def total(self) -> list[int]:
        """Bytes after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=self.before.total()))[1:]

    @cached_property
    def at_peak(self) -> Counter[Holder]:
        """Bytes by allocation site at the moment when most are held."""
        held = self.before.copy()
        for change in self.changes[: self.total.index(max(self.total)) + 1]:
            held[change.holder] += change.bytes
        return +held

    def of(self, holders: Sequence[Holder]) -> list[list[int]]:
        """Return each allocation site's bytes after each change."""
        changes = {holder: [self.before[holder]] for holder in holders}
        for change in self.changes:
            for holder, bytes_ in changes.items():
                bytes_.append(change.bytes if change.holder == holder else 0)
        return [list(accumulate(site_changes))[1:] for site_changes in changes.values()]


@dataclass
class LiveMemory:
    """Recorder for allocations and releases. `now` returns the number of operations counted so far."""

    now: Callable[[], int]
    changes: list[Change] = field(default_factory=list)
    current: int = 0
    _known: dict[int, weakref.ref[object]] = field(default_factory=dict)

    def note(self, tensor: Tensor, place: str, part: str) -> None:
        """Record the allocation of a tensor's storage, unless it is known and still alive."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        self._change((part, place), storage.nbytes())
        self._known[key] = weakref.ref(storage, partial(self._died, (part, place), storage.nbytes(), key))

    def _change(self, holder: Holder, more: int) -> None:
        self.changes.append(Change(self.now(), holder, more))
        self.current += more

    def _died(self, holder: Holder, size: int, key: int, _: object) -> None:
        self._change(holder, -size)
        del self._known[key]

    def course(self, start: int = 0) -> Course:
        """Return the memory timeline from the change with this number on."""
        before: Counter[Holder] = Counter()
        for change in self.changes[:start]:
            before[change.holder] += change.bytes
        return Course(+before, self.changes[start:])
