"""Data that a run skips after a rollback, as a map from training steps to data steps.

A data step is the index of a global batch in a phase's data. A training step is the index of a step in a phase. Both
are counted from 0 at the phase's start. Training step n reads the batch with data step n + k, where k is the number of
batches in all skipped ranges before that batch. Before the first range k is 0. Checkpoints store the skipped ranges:
`windows` in a checkpoint's manifest is a list with an element (phase index, first skipped data step, first data step
after the range) for each range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridtron.config.resolve import ResolvedPhase


class BatchKey(NamedTuple):
    """Key of a global batch."""

    phase: int  # the phase's index
    step: int  # the batch's data step


class SkippedRange(NamedTuple):
    """Skipped data steps in a phase: from `first` to `end` - 1."""

    phase: int  # the phase's index
    first: int
    end: int


class SkippedData:
    """All skipped ranges of a run so far, sorted. Ranges that overlap or follow each other directly are merged."""

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
        """Return True if data is skipped between a training step and the training step before it."""
        return step > 0 and self.data_step(phase, step) != self.data_step(phase, step - 1) + 1

    def runs(self, phase: int, first: int, end: int) -> list[range]:
        """Return the data steps that the training steps `first` to `end` - 1 read, as contiguous ranges in order."""
        if first < end:
            begins = [first, *(step for step in range(first + 1, end) if self.jumps(phase, step))]
        else:
            begins = []
        return [
            range(self.data_step(phase, a), self.data_step(phase, b - 1) + 1)
            for a, b in itertools.pairwise([*begins, end])
        ]

    def and_failed(self, phases: Iterable[ResolvedPhase], done: int, failed: int) -> SkippedData:
        """Return the skipped data, extended by the batches that failed steps have read.

        `done` is the last step that is kept. `failed` is the last failed step. Both are counted from 1 at the run's
        start, and may be in different phases.
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
