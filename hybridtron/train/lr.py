"""Learning rate and weight decay as pure functions of the phases and of the tokens that the one under way has seen."""

from __future__ import annotations

import math
from collections.abc import Callable

from hybridtron.config.choices import DecaySchedule, LrPiece, Moments, Schedule
from hybridtron.config.schema import Config, OptimConfig
from hybridtron.config.units import parse_share, parse_tokens


def learning_rate(config: Config, index: int, tokens: int) -> float:
    """The rate for the step that brings a phase to `tokens`, as its piece says."""
    phase = config.phases[index]
    optim = config.in_phase(phase).optim
    if phase.lr_piece is LrPiece.decay:
        assert phase.lr_to is not None
        begun, whole = _end_of(config, index - 1), parse_tokens(phase.tokens)
        return phase.lr_to + (begun - phase.lr_to) * _shape(optim)(min(tokens / whole, 1.0))
    leader = index
    while config.phases[leader].lr_piece is LrPiece.carry_on:
        leader -= 1
        tokens += parse_tokens(config.phases[leader].tokens)
    return _course(config, leader, tokens)


def weight_decay(config: Config, index: int, lr: float) -> float:
    """The weight decay for a step at this learning rate: that of the phase, or its share that the rate is of its peak.

    A phase without a peak of its own goes by that of the course that it carries on or ends.
    """
    optim = config.in_phase(config.phases[index]).optim
    if optim.weight_decay_schedule is DecaySchedule.constant:
        return optim.weight_decay
    peak = next(phase.lr for phase in reversed(config.phases[: index + 1]) if phase.lr is not None)
    return optim.weight_decay * lr / peak


def _course(config: Config, leader: int, tokens: int) -> float:
    """Linear warm-up, then cosine or WSD to final_lr, over a phase and those that continue it."""
    phase = config.phases[leader]
    optim, peak = config.in_phase(phase).optim, phase.lr
    assert peak is not None
    whole = parse_tokens(phase.tokens)
    for follower in config.phases[leader + 1 :]:
        if follower.lr_piece is not LrPiece.carry_on:
            break
        whole += parse_tokens(follower.tokens)
    warmup = parse_share(optim.warmup, whole)
    if tokens < warmup:
        anew = leader == 0 or phase.moments is Moments.reset or phase.init_from is not None
        begun = 0.0 if anew else min(_end_of(config, leader - 1), peak)
        return begun + (peak - begun) * tokens / warmup
    start = warmup if optim.schedule is Schedule.cosine else whole - parse_share(optim.decay, whole)
    lowest = peak * optim.final_lr
    progress = min(max((tokens - start) / max(whole - start, 1), 0.0), 1.0)
    return lowest + (peak - lowest) * _shape(optim)(progress)


def _end_of(config: Config, index: int) -> float:
    """The rate at which a phase ends."""
    return learning_rate(config, index, parse_tokens(config.phases[index].tokens))


def _shape(optim: OptimConfig) -> Callable[[float], float]:
    return _cosine if optim.schedule is Schedule.cosine else _linear


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float) -> float:
    return 1 - progress
