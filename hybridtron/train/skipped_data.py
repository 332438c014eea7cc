"""Data that a run skips after a rollback, as a map from training steps to data steps.

Both kinds of steps count from 0 at the start of their phase. They are equal up to the first skipped range; after it the
data step is ahead by the skipped steps. Checkpoints store the ranges, since they determine which data comes next:
`windows` in the manifest is a list of (phase, first skipped data step, first data step after the range).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridtron.config.resolve import ResolvedPhase


class BatchKey(NamedTuple):
    """Key of a step's global batch: its phase, and its data step in the phase."""

    phase: int
    step: int


class SkippedRange(NamedTuple):
    """Skipped data steps of a phase: from `first` to before `end`."""

    phase: int
    first: int
    end: int


class SkippedData:
    """All skipped ranges of a run so far, sorted. Ranges that touch are merged."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.all: list[SkippedRange] = []
        for skip in sorted(SkippedRange(*numbers) for numbers in ranges):
            last = self.all[-1] if self.all else None
            if last is not None and last.phase == skip.phase and skip.first <= last.end:
                self.all[-1] = last._replace(end=max(last.end, skip.end))
            else:
                self.all.append(skip)

    def data_step(self, phase: int, step: int) -> int:
        """Return the data step that a training step reads."""
        for skipped in self.all:
            if skipped.phase == phase and skipped.first <= step:
                step += skipped.end - skipped.first
        return step

    def jumps(self, phase: int, step: int) -> bool:
        """Return True if data is skipped between a training step and the step before it."""
        return step > 0 and self.data_step(phase, step) != self.data_step(phase, step - 1) + 1

    def runs(self, phase: int, first: int, end: int) -> list[range]:
        """Return the data steps of the training steps from `first` to before `end`, as contiguous ranges."""
        if first < end:
            begins = [first, *(step for step in range(first + 1, end) if self.jumps(phase, step))]
        else:
            begins = []
        return [
            range(self.data_step(phase, a), self.data_step(phase, b - 1) + 1)
            for a, b in itertools.pairwise([*begins, end])
        ]

    def and_failed(self, phases: Iterable[ResolvedPhase], done: int, failed: int) -> SkippedData:
        """Return the skipped data extended by the data that the steps after `done` read, up to and including `failed`.

        Both count over the run; they may lie in different phases.
        """
        added = []
        for phase in phases:
            within = (min(max(step, phase.start_step), phase.end_step) for step in (done, failed))
            first, end = (step - phase.start_step for step in within)
            if first < end:
                first_data = self.data_step(phase.index, first)
                end_data = self.data_step(phase.index, end - 1) + 1
                added.append(SkippedRange(phase.index, first_data, end_data))
        return SkippedData([*self.all, *added])
