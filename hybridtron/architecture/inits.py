"""Initialisation rules as names and numbers, without torch. `model/init.py` fills tensors with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A constant value everywhere."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Gaussian with mean zero."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform on [-bound, bound]."""

    bound: float


@dataclass(frozen=True)
class Projection(Uniform):
    """Uniform initialisation of a projection; `model.init` may replace it everywhere."""


@dataclass(frozen=True)
class OutputProjection(Uniform):
    """Uniform initialisation of a sub-layer's output projection; `model.init` may replace it everywhere."""


@dataclass(frozen=True)
class LogRange:
    """log 1, log 2, ..., log n along the last axis: S4D-Real's A_log."""


@dataclass(frozen=True)
class LogUniform:
    """Logarithms of values that are uniform on [low, high]: A_log of Mamba-2."""

    low: float
    high: float


@dataclass(frozen=True)
class InverseSoftplus:
    """Values whose softplus is log-uniform on [low, high]: the step sizes of Mamba."""

    low: float
    high: float


@dataclass(frozen=True)
class Orthogonal:
    """Orthogonal rows (or columns, if there are fewer) of this length, for a projection; 0: zeros."""

    length: float


@dataclass(frozen=True)
class Ramp:
    """first + (last - first) (i / (n - 1))^exponent for i = 0, ..., n - 1, along all n values of the tensor.

    `zigzag` times 0, 1, -1, 0, 1, -1, ... is added.
    """

    first: float
    last: float
    exponent: float = 1.0
    zigzag: float = 0.0


@dataclass(frozen=True)
class Rows:
    """A separate ramp for each row along the first axis."""

    starts: tuple[Ramp, ...]


Init = Constant | Normal | Uniform | LogRange | LogUniform | InverseSoftplus | Orthogonal | Ramp | Rows
