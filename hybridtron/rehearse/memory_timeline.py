"""Memory timeline of a step: when tensors on the device are allocated and freed, and by which lines.

Steps are simulated without a GPU. A storage is the memory behind one or several tensors. A storage counts as allocated
when its first tensor is recorded, and as freed when Python has deleted its last tensor, in any thread. The ordered list
of these changes gives the total memory and each allocation site's memory at every moment.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate

from torch import Tensor

AllocationSite = tuple[str, str]
"""Allocation site: a part of the step ("build", "passes", "update"), and the source line that allocates a tensor."""


@dataclass(frozen=True)
class Change:
    """Change in an allocation site's bytes, negative if memory is freed.

    `moment` is how many operations were counted before the change.
    """

    moment: int
    site: AllocationSite
    bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory timeline for a part of a step.

    before   each allocation site's bytes before this part
    changes  changes during this part, in order
    """

    before: Counter[AllocationSite]
    changes: list[Change]

    @cached_property
    def total(self) -> list[int]:
        """Bytes after each change."""
        return list(accumulate((change.bytes for change in self.changes), initial=self.before.total()))[1:]

    @cached_property
    def at_peak(self) -> Counter[AllocationSite]:
        """Each allocation site's bytes at the moment when the total is largest."""
        peak = self.before.copy()
        for change in self.changes[: self.total.index(max(self.total)) + 1]:
            peak[change.site] += change.bytes
        return +peak

    def of(self, sites: Sequence[AllocationSite]) -> list[list[int]]:
        """Return for each of these allocation sites a list with its bytes after each change."""
        changes = {site: [self.before[site]] for site in sites}
        for change in self.changes:
            for site, bytes_ in changes.items():
                bytes_.append(change.bytes if change.site == site else 0)
        return [list(accumulate(site_changes))[1:] for site_changes in changes.values()]


@dataclass
class LiveMemory:
    """Recorder for allocated and freed memory.

    `now` is a function that returns how many operations were counted so far. `current` is the number of bytes that are
    allocated at the moment.
    """

    now: Callable[[], int]
    changes: list[Change] = field(default_factory=list)
    current: int = 0
    _known: dict[int, weakref.ref[object]] = field(default_factory=dict)

    def note(self, tensor: Tensor, place: str, part: str) -> None:
        """Record the allocation of a tensor's storage, unless the storage is recorded already and not freed yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        self._change((part, place), storage.nbytes())
        self._known[key] = weakref.ref(storage, partial(self._died, (part, place), storage.nbytes(), key))

    def _change(self, site: AllocationSite, more: int) -> None:
        self.changes.append(Change(self.now(), site, more))
        self.current += more

    def _died(self, site: AllocationSite, size: int, key: int, _: object) -> None:
        self._change(site, -size)
        del self._known[key]

    def timeline(self, start: int = 0) -> MemoryTimeline:
        """Return the memory timeline for all changes from the index `start` on."""
        before: Counter[AllocationSite] = Counter()
        for change in self.changes[:start]:
            before[change.site] += change.bytes
        return MemoryTimeline(+before, self.changes[start:])
