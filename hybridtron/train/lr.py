"""The learning rate as a pure function of the tokens that a phase has seen."""

from __future__ import annotations

import math

from hybridtron.config.schema import OptimConfig, PhaseConfig, Schedule
from hybridtron.config.units import parse_share, parse_tokens


def learning_rate(tokens: int, phase: PhaseConfig, optim: OptimConfig) -> float:
    """The rate for the step that brings the phase to `tokens`: linear warm-up, then cosine or WSD to final_lr."""
    whole = parse_tokens(phase.tokens)
    warmup = parse_share(optim.warmup, whole)
    if tokens < warmup:
        return phase.lr * tokens / warmup
    lowest = phase.lr * optim.final_lr
    if optim.schedule == Schedule.cosine:
        start, shape = warmup, _cosine
    else:
        start, shape = whole - parse_share(optim.decay, whole), _linear
    progress = min(max((tokens - start) / max(whole - start, 1), 0.0), 1.0)
    return lowest + (phase.lr - lowest) * shape(progress)


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float) -> float:
    return 1 - progress
