"""Windows of the data that a run left out after rolling back, and so which data each of its steps reads.

Steps of training and of the data are counted from 0 at the start of their phase. They are the same up to the first
window; from there on training is behind. The windows are part of the data position, so a checkpoint holds them, as
lists of three numbers: phase, first step of the data, and the step of the data that is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridtron.config.resolve import ResolvedPhase


class Window(NamedTuple):
    """The data of a phase from step `first` to before `end`."""

    phase: int
    first: int
    end: int


class Windows:
    """All that was left out so far; windows that touch are one."""

    def __init__(self, windows: Iterable[Sequence[int]] = ()) -> None:
        self.all: list[Window] = []
        for window in sorted(Window(*numbers) for numbers in windows):
            last = self.all[-1] if self.all else None
            if last is not None and last.phase == window.phase and window.first <= last.end:
                self.all[-1] = last._replace(end=max(last.end, window.end))
            else:
                self.all.append(window)

    def data_step(self, phase: int, step: int) -> int:
        """The step of the data that a step of training reads."""
        for window in self.all:
            if window.phase == phase and window.first <= step:
                step += window.end - window.first
        return step

    def jumps(self, phase: int, step: int) -> bool:
        """Whether a step of training does not read on where the one before it stopped."""
        return step > 0 and self.data_step(phase, step) != self.data_step(phase, step - 1) + 1

    def runs(self, phase: int, first: int, end: int) -> list[range]:
        """The steps of the data that the steps of training from `first` to before `end` read, in unbroken runs."""
        borders, behind = [], 0
        for window in self.all:
            if window.phase == phase:
                if first < window.first - behind < end:
                    borders.append(window.first - behind)
                behind += window.end - window.first
        return [
            range(self.data_step(phase, a), self.data_step(phase, b - 1) + 1)
            for a, b in zip([first, *borders], [*borders, end], strict=True)
            if a < b
        ]

    def without(self, phases: Iterable[ResolvedPhase], done: int, failed: int) -> Windows:
        """The windows after the steps of the run beyond `done`, up to `failed` itself, are left out as well."""
        added = []
        for phase in phases:
            first, end = (
                min(max(step, phase.start_step), phase.end_step) - phase.start_step for step in (done, failed)
            )
            if first < end:
                data = self.data_step(phase.index, first), self.data_step(phase.index, end - 1) + 1
                added.append(Window(phase.index, *data))
        return Windows([*self.all, *added])

    def as_lists(self) -> list[list[int]]:
        """As a checkpoint holds them."""
        return [list(window) for window in self.all]
