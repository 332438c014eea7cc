"""Which steps belong to which phase: the run's plan, from the configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import parse_tokens


@dataclass(frozen=True)
class Stretch:
    """A phase with the steps it covers, counted over the whole run; `first` is the last step of the one before."""

    index: int
    phase: PhaseConfig
    first: int
    last: int
    tokens_before: int

    def tokens_at(self, step: int) -> int:
        """Tokens seen by the whole run after this step."""
        return self.tokens_before + self.phase_tokens_at(step)

    def phase_tokens_at(self, step: int) -> int:
        """Tokens seen by this phase after this step of the run."""
        return (step - self.first) * self.phase.tokens_per_step


def stretches(config: Config) -> list[Stretch]:
    """The phases in order, each with enough whole steps for its tokens."""
    plan: list[Stretch] = []
    first = tokens = 0
    for index, phase in enumerate(config.phases):
        steps = math.ceil(parse_tokens(phase.tokens) / phase.tokens_per_step)
        plan.append(Stretch(index, phase, first, first + steps, tokens))
        first, tokens = first + steps, tokens + steps * phase.tokens_per_step
    return plan


def last_step(config: Config) -> int:
    """The step at which the run ends: after its phases, or at run.max_steps."""
    end = stretches(config)[-1].last
    return end if config.run.max_steps is None else min(end, config.run.max_steps)
