"""Which tensors exist on the device at every moment of a step, and what made them.

A storage is born with the first tensor seen on it and dies when the last one is gone, on whatever thread. What is kept
is the list of births and deaths in order, from which the sum at every moment follows, and what it consists of.
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
"""The part of the step in which a tensor is made, and the line that makes it."""


@dataclass(frozen=True)
class Change:
    """Bytes more, or less, of a holder, when `moment` operations have been counted."""

    moment: int
    holder: Holder
    bytes: int


@dataclass(frozen=True)
class Course:
    """What is held before a stretch of a step, and the changes of it in order."""

    before: Counter[Holder]
    changes: list[Change]

    @cached_property
    def total(self) -> list[int]:
        """Bytes after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=self.before.total()))[1:]

    @cached_property
    def at_peak(self) -> Counter[Holder]:
        """Bytes by holder at the moment at which most are held."""
        held = self.before.copy()
        for change in self.changes[: self.total.index(max(self.total)) + 1]:
            held[change.holder] += change.bytes
        return +held

    def of(self, holders: Sequence[Holder]) -> list[list[int]]:
        """Bytes after each change, of each of these holders."""
        changes = {holder: [self.before[holder]] for holder in holders}
        for change in self.changes:
            for holder, bytes_ in changes.items():
                bytes_.append(change.bytes if change.holder == holder else 0)
        return [list(accumulate(each))[1:] for each in changes.values()]


@dataclass
class LiveMemory:
    """Births and deaths, in order. `now`: how many operations have been counted."""

    now: Callable[[], int]
    changes: list[Change] = field(default_factory=list)
    current: int = 0
    _known: dict[int, weakref.ref[object]] = field(default_factory=dict)

    def note(self, tensor: Tensor, place: str, part: str) -> None:
        """A tensor has been seen."""
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
        """From the change with this number on."""
        before: Counter[Holder] = Counter()
        for change in self.changes[:start]:
            before[change.holder] += change.bytes
        return Course(+before, self.changes[start:])
