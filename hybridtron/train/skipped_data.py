"""Data that a run skipped after rolling back, and so which data each of its steps reads.

Steps of training and of the data are counted from 0 at the start of their phase. They are the same up to the first
skipped range; from there on training is behind. The ranges are part of the data position, so a checkpoint holds them,
as lists of three numbers (`windows` in its manifest): phase, first step of the data, and the step of the data that is
read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridtron.config.resolve import ResolvedPhase


class SkippedRange(NamedTuple):
    """The data of a phase from step `first` to before `end`."""

    phase: int
    first: int
    end: int


class SkippedData:
    """All that was skipped so far; ranges that touch are merged."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.all: list[SkippedRange] = []
        for found in sorted(SkippedRange(*numbers) for numbers in ranges):
            last = self.all[-1] if self.all else None
            if last is not None and last.phase == found.phase and found.first <= last.end:
                self.all[-1] = last._replace(end=max(last.end, found.end))
            else:
                self.all.append(found)

    def data_step(self, phase: int, step: int) -> int:
        """The step of the data that a step of training reads."""
        for skipped in self.all:
            if skipped.phase == phase and skipped.first <= step:
                step += skipped.end - skipped.first
        return step

    def jumps(self, phase: int, step: int) -> bool:
        """Whether a step of training does not continue reading where the step before it stopped."""
        return step > 0 and self.data_step(phase, step) != self.data_step(phase, step - 1) + 1

    def runs(self, phase: int, first: int, end: int) -> list[range]:
        """The steps of the data that the steps of training from `first` to before `end` read, in unbroken runs."""
        begins = [first, *(step for step in range(first + 1, end) if self.jumps(phase, step))] if first < end else []
        return [
            range(self.data_step(phase, a), self.data_step(phase, b - 1) + 1)
            for a, b in itertools.pairwise([*begins, end])
        ]

    def and_failed(self, phases: Iterable[ResolvedPhase], done: int, failed: int) -> SkippedData:
        """What is skipped when the steps of the run beyond `done`, up to `failed` itself, are skipped as well."""
        added = []
        for phase in phases:
            within = (min(max(step, phase.start_step), phase.end_step) for step in (done, failed))
            first, end = (step - phase.start_step for step in within)
            if first < end:
                data = self.data_step(phase.index, first), self.data_step(phase.index, end - 1) + 1
                added.append(SkippedRange(phase.index, *data))
        return SkippedData([*self.all, *added])
