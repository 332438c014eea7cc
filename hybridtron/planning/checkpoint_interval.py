"""Interval between checkpoints that loses the least time, from measured times (Young, 1974; Daly, 2006).

A run saves a checkpoint every t seconds of training. A checkpoint stops training for s seconds. Failures come every m
seconds on average. After a failure, the run restarts in r seconds and repeats t / 2 seconds of steps on average. For
s < 2m, Daly's interval

    t = sqrt(2 s m) (1 + sqrt(s / 2m) / 3 + (s / 2m) / 9) - s

is close to the best; for larger s, t = m. The square root of 2 s m is Young's interval. The fraction of the time that
is lost is about s / (t + s) + (t / 2 + r) / m.
"""

from __future__ import annotations

import math

DEVICE_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
"""Device hours between unexpected failures: Llama 3 had 419 in 54 days on 16,384 H100s (its report, section 3.3.4)."""


def seconds_between_failures(devices: int) -> float:
    """Return the mean time between failures on this number of devices, at the failure rate of Llama 3's training."""
    return DEVICE_HOURS_PER_FAILURE * 3600 / devices


def best_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds of training between checkpoints that lose the least time."""
    ratio = save_s / (2 * failure_s)
    if ratio >= 1:
        return failure_s
    young = math.sqrt(2 * save_s * failure_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_fraction(interval_s: float, save_s: float, start_s: float, failure_s: float) -> float:
    """Return the fraction of the time that saving, restarting and repeating lose."""
    return save_s / (interval_s + save_s) + (interval_s / 2 + start_s) / failure_s
