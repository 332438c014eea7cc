"""Batch size of each step, in rows (sequences): `global_batch`, or fewer rows during the ramp at a phase's start.

The batch sizes in a ramp are `ramp.start`, `ramp.start + ramp.step`, and so on, below `global_batch`. Each batch size
lasts for an equal share of `ramp.tokens`, rounded up to full steps. Steps and rows are counted from the phase's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from hybridtron.config.phase_schema import PhaseConfig
from hybridtron.config.units import parse_tokens


@dataclass(frozen=True)
class BatchRamp:
    """Batch sizes of the steps in a phase.

    stairs: a pair (step count, rows in each step) for each batch size in the ramp, in order
    rows_at_last: rows in each step after the ramp (global_batch)
    """

    stairs: tuple[tuple[int, int], ...]
    rows_at_last: int

    @classmethod
    def of(cls, phase: PhaseConfig) -> Self:
        """Build the batch sizes for a phase. Without a ramp, `stairs` is empty."""
        if phase.ramp is None:
            return cls((), phase.global_batch)
        sizes = range(phase.ramp.start, phase.global_batch, phase.ramp.step)
        share = parse_tokens(phase.ramp.tokens) / len(sizes)
        return cls(tuple((math.ceil(share / (rows * phase.seq_len)), rows) for rows in sizes), phase.global_batch)

    def rows(self, step: int) -> int:
        """Return how many rows a step has; the phase's first step is step 0."""
        for steps, rows in self.stairs:
            if step < steps:
                return rows
            step -= steps
        return self.rows_at_last

    def rows_before(self, step: int) -> int:
        """Return the total number of rows in the steps before `step`; the phase's first step is step 0."""
        total = 0
        for steps, rows in self.stairs:
            total += min(step, steps) * rows
            step = max(step - steps, 0)
        return total + step * self.rows_at_last

    def steps_for(self, rows: int) -> int:
        """Return how many steps, counted from the phase's start, are needed to read `rows` rows."""
        done = 0
        for steps, size in self.stairs:
            if rows <= steps * size:
                return done + math.ceil(rows / size)
            done = done + steps
            rows = rows - steps * size
        return done + math.ceil(rows / self.rows_at_last)
