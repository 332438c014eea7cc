"""Learning rate and weight decay, as pure functions of the phases and the tokens read.

In a course the learning rate rises and falls once. A course covers a phase, and the phases after it with
`lr_piece: carry_on`. The shapes of its fall are in `config/lr_shapes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtron.config.choices import DecaySchedule, LrPiece, Moments
from hybridtron.config.lr_shapes import SHAPES, LrPosition
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.units import parse_share, parse_tokens


def learning_rate(phases: Sequence[ResolvedPhase], index: int, tokens: int) -> float:
    """Return the learning rate for a step, after which phase `index` has read `tokens` tokens.

    With `lr_piece: decay` the rate falls from the final rate of the phase before to `lr_to`. Other phases follow their
    course.
    """
    settings = phases[index].settings
    if settings.lr_piece is LrPiece.decay:
        assert settings.lr_to is not None
        start_lr = _end_of(phases, index - 1)
        phase_tokens = parse_tokens(settings.tokens)
        at = LrPosition(tokens, warmup=0, whole=phase_tokens, decay=phase_tokens)
        return settings.lr_to + (start_lr - settings.lr_to) * SHAPES[phases[index].optim.schedule].height(at)
    leader = index
    while phases[leader].settings.lr_piece is LrPiece.carry_on:
        leader -= 1
        tokens += parse_tokens(phases[leader].settings.tokens)
    return _course(phases, leader, tokens)


def weight_decay(phases: Sequence[ResolvedPhase], index: int, lr: float) -> float:
    """Return the weight decay for a step with this learning rate.

    It is the phase's constant, or that constant times lr / peak. A phase without a peak of its own uses the last peak
    before it.
    """
    optim = phases[index].optim
    if optim.weight_decay_schedule is DecaySchedule.constant:
        return optim.weight_decay
    rates = (phase.settings.lr for phase in reversed(phases[: index + 1]))
    peak = next(rate for rate in rates if rate is not None)
    return optim.weight_decay * lr / peak


def _course(phases: Sequence[ResolvedPhase], leader: int, tokens: int) -> float:
    """Return the learning rate at `tokens` of the course that phase `leader` begins.

    The rate is 0 during the hold, rises linearly during the warm-up, then falls to final_lr by the phase's shape.
    """
    phase = phases[leader].settings
    optim = phases[leader].optim
    peak = phase.lr
    assert peak is not None
    total_tokens = parse_tokens(phase.tokens)
    for follower in phases[leader + 1 :]:
        if follower.settings.lr_piece is not LrPiece.carry_on:
            break
        total_tokens += parse_tokens(follower.settings.tokens)
    hold = parse_share(optim.hold, total_tokens)
    warmup = parse_share(optim.warmup, total_tokens)
    if tokens <= hold and hold:
        return 0.0
    if (tokens := tokens - hold) < warmup:
        from_zero = leader == 0 or hold or phase.moments is Moments.reset or phase.init_from is not None
        if from_zero:
            start_lr = 0.0
        else:
            start_lr = min(_end_of(phases, leader - 1), peak)
        return start_lr + (peak - start_lr) * tokens / warmup
    shape = SHAPES[optim.schedule]
    lowest = peak * optim.final_lr
    if shape.uses_decay:
        decay = parse_share(optim.decay, total_tokens)
    else:
        decay = 0
    return lowest + (peak - lowest) * shape.height(LrPosition(tokens, warmup, total_tokens - hold, decay))


def _end_of(phases: Sequence[ResolvedPhase], index: int) -> float:
    """Return the final learning rate of a phase."""
    return learning_rate(phases, index, parse_tokens(phases[index].settings.tokens))
