"""How many rows each step of a phase reads: as many as `global_batch` says, or fewer while its ramp lasts.

The ramp's tokens are shared out evenly among its sizes, each of which runs for whole steps. Steps count from 0 at the
start of the phase, rows from the first that it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from hybridtron.config.phase_schema import PhaseConfig
from hybridtron.config.units import parse_tokens


@dataclass(frozen=True)
class Growth:
    """Stairs of (steps, rows), one after another, and then steps of `rows_at_last` to the end."""

    stairs: tuple[tuple[int, int], ...]
    rows_at_last: int

    @classmethod
    def of(cls, phase: PhaseConfig) -> Self:
        if phase.ramp is None:
            return cls((), phase.global_batch)
        sizes = range(phase.ramp.start, phase.global_batch, phase.ramp.step)
        share = parse_tokens(phase.ramp.tokens) / len(sizes)
        return cls(tuple((math.ceil(share / (rows * phase.seq_len)), rows) for rows in sizes), phase.global_batch)

    def rows(self, step: int) -> int:
        """That a step reads."""
        for steps, rows in self.stairs:
            if step < steps:
                return rows
            step -= steps
        return self.rows_at_last

    def rows_before(self, step: int) -> int:
        """That all steps before it read."""
        total = 0
        for steps, rows in self.stairs:
            total += min(step, steps) * rows
            step = max(step - steps, 0)
        return total + step * self.rows_at_last

    def steps_for(self, rows: int) -> int:
        """The fewest steps that read that number of rows."""
        done = 0
        for steps, size in self.stairs:
            if rows <= steps * size:
                return done + math.ceil(rows / size)
            done, rows = done + steps, rows - steps * size
        return done + math.ceil(rows / self.rows_at_last)
