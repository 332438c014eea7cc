"""Rows that each step reads: `global_batch`, or fewer while a phase's ramp lasts.

The ramp's tokens are divided evenly among its batch sizes, each of which runs for whole steps. Steps and rows count
from the start of the phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from hybridtron.config.phase_schema import PhaseConfig
from hybridtron.config.units import parse_tokens


@dataclass(frozen=True)
class Growth:
    """Batch sizes over a phase: stairs of (steps, rows), one after another, then `rows_at_last` to the end."""

    stairs: tuple[tuple[int, int], ...]
    rows_at_last: int

    @classmethod
    def of(cls, phase: PhaseConfig) -> Self:
        """Build the stairs from a phase's ramp; without a ramp there are none."""
        if phase.ramp is None:
            return cls((), phase.global_batch)
        sizes = range(phase.ramp.start, phase.global_batch, phase.ramp.step)
        share = parse_tokens(phase.ramp.tokens) / len(sizes)
        return cls(tuple((math.ceil(share / (rows * phase.seq_len)), rows) for rows in sizes), phase.global_batch)

    def rows(self, step: int) -> int:
        """Return the number of rows that a step reads."""
        for steps, rows in self.stairs:
            if step < steps:
                return rows
            step -= steps
        return self.rows_at_last

    def rows_before(self, step: int) -> int:
        """Return the total rows of all steps before this one."""
        total = 0
        for steps, rows in self.stairs:
            total += min(step, steps) * rows
            step = max(step - steps, 0)
        return total + step * self.rows_at_last

    def steps_for(self, rows: int) -> int:
        """Return the fewest steps that read at least `rows` rows."""
        done = 0
        for steps, size in self.stairs:
            if rows <= steps * size:
                return done + math.ceil(rows / size)
            done = done + steps
            rows = rows - steps * size
        return done + math.ceil(rows / self.rows_at_last)
