"""Which steps belong to which phase: the run's plan, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtron.config.growth import Growth
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
    growth: Growth

    def tokens_at(self, step: int) -> int:
        """Tokens seen by the whole run after this step."""
        return self.tokens_before + self.phase_tokens_at(step)

    def phase_tokens_at(self, step: int) -> int:
        """Tokens seen by this phase after this step of the run."""
        return self.growth.rows_before(step - self.first) * self.phase.seq_len

    def tokens_of(self, step: int) -> int:
        """Tokens that this step of the run reads."""
        return self.growth.rows(step - self.first - 1) * self.phase.seq_len

    @property
    def tokens(self) -> int:
        return self.phase_tokens_at(self.last)


def stretches(config: Config) -> list[Stretch]:
    """The phases in order, each with enough whole steps for its tokens."""
    plan: list[Stretch] = []
    first = tokens = 0
    for index, phase in enumerate(config.phases):
        growth = Growth.of(phase)
        steps = growth.steps_for(-(-parse_tokens(phase.tokens) // phase.seq_len))
        plan.append(Stretch(index, phase, first, first + steps, tokens, growth))
        first, tokens = first + steps, tokens + plan[-1].tokens
    return plan


def last_step(config: Config) -> int:
    """The step at which the run ends: after its phases, or at run.max_steps."""
    end = stretches(config)[-1].last
    return end if config.run.max_steps is None else min(end, config.run.max_steps)


def phase_of(config: Config, step: int) -> Stretch:
    """The phase that a step belongs to; the first one's start belongs to it."""
    return next(one for one in stretches(config) if step <= one.last)


def phase_after(config: Config, step: int) -> Stretch:
    """The phase that goes on after a step, before the end of the run."""
    return next(one for one in stretches(config) if step < one.last)
