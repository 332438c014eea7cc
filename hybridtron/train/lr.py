"""Learning rate and weight decay, as pure functions of the phases and the tokens read.

A run consists of phases. A phase's setting `lr_piece` says how its learning rate is computed:

    rewarm      The phase begins a schedule: the rate is 0 during an optional hold, rises linearly during the warm-up,
                and then falls by the shape `optim.schedule` (`config/lr_shapes.py`).
    carry_on    The phase continues the schedule of the phase before, as if both were one long phase.
    decay       The rate falls from its last value in the phase before to the setting `lr_to`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtron.config.choices import DecaySchedule, LrPiece, Moments
from hybridtron.config.lr_shapes import SHAPES, LrPosition
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.units import parse_share, parse_tokens


def learning_rate(phases: Sequence[ResolvedPhase], index: int, tokens: int) -> float:
    """Return the learning rate of the step after which the phase at `index` has read `tokens` tokens."""
    settings = phases[index].settings
    if settings.lr_piece is LrPiece.decay:
        assert settings.lr_to is not None
        start_lr = _final_rate(phases, index - 1)
        phase_tokens = parse_tokens(settings.tokens)
        at = LrPosition(tokens, warmup=0, whole=phase_tokens, decay=phase_tokens)
        return settings.lr_to + (start_lr - settings.lr_to) * SHAPES[phases[index].optim.schedule].height(at)
    first = index
    while phases[first].settings.lr_piece is LrPiece.carry_on:
        first -= 1
        tokens += parse_tokens(phases[first].settings.tokens)
    return _scheduled(phases, first, tokens)


def weight_decay(phases: Sequence[ResolvedPhase], index: int, lr: float) -> float:
    """Return the weight decay for a step with learning rate `lr` in the phase with this index.

    If `optim.weight_decay_schedule` is constant, the weight decay is `optim.weight_decay`. Otherwise it is
    `optim.weight_decay * lr / peak`. The peak is the phase's setting `lr`. If the phase has no `lr`, the peak is the
    `lr` of the last earlier phase that has an `lr`.
    """
    optim = phases[index].optim
    if optim.weight_decay_schedule is DecaySchedule.constant:
        return optim.weight_decay
    rates = (phase.settings.lr for phase in reversed(phases[: index + 1]))
    peak = next(rate for rate in rates if rate is not None)
    return optim.weight_decay * lr / peak


def _scheduled(phases: Sequence[ResolvedPhase], first: int, tokens: int) -> float:
    """Return the learning rate after `tokens` tokens in the schedule that begins with the phase at index `first`.

    The rate is 0 for the first `optim.hold` tokens. Then it rises linearly to the peak for `optim.warmup` tokens, and
    after that it falls by the shape `optim.schedule`, to `optim.final_lr` * peak.

    The rise begins at 0 in the run's first phase, after a hold, or if weights, moments or the optimizer are replaced at
    the phase's beginning. Otherwise it begins at the final rate of the phase before, but not above the peak.
    """
    phase = phases[first].settings
    optim = phases[first].optim
    peak = phase.lr
    assert peak is not None
    total_tokens = parse_tokens(phase.tokens)
    for follower in phases[first + 1 :]:
        if follower.settings.lr_piece is not LrPiece.carry_on:
            break
        total_tokens += parse_tokens(follower.settings.tokens)
    hold = parse_share(optim.hold, total_tokens)
    warmup = parse_share(optim.warmup, total_tokens)
    if tokens <= hold and hold:
        return 0.0
    if (tokens := tokens - hold) < warmup:
        without_moments = phase.moments is Moments.reset or not phases[first].keeps_optimizer
        if first == 0 or hold or without_moments or phase.init_from is not None:
            start_lr = 0.0
        else:
            start_lr = min(_final_rate(phases, first - 1), peak)
        return start_lr + (peak - start_lr) * tokens / warmup
    shape = SHAPES[optim.schedule]
    lowest = peak * optim.final_lr
    if shape.uses_decay:
        decay = parse_share(optim.decay, total_tokens)
    else:
        decay = 0
    return lowest + (peak - lowest) * shape.height(LrPosition(tokens, warmup, total_tokens - hold, decay))


def _final_rate(phases: Sequence[ResolvedPhase], index: int) -> float:
    """Return the learning rate at the last step of the phase with this index."""
    return learning_rate(phases, index, parse_tokens(phases[index].settings.tokens))
