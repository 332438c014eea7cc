"""How weights start: rules by name and numbers, without torch. `model/init.py` fills tensors by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Every value the same."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Gaussian around zero."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform on [-bound, bound]."""

    bound: float


@dataclass(frozen=True)
class Projection(Uniform):
    """A linear layer's, unless `model.init` has another rule for all of them."""


@dataclass(frozen=True)
class OutputProjection(Uniform):
    """The same of the last projection of a residual sub-layer."""


@dataclass(frozen=True)
class LogRange:
    """log 1, log 2, ..., log n along the last axis: S4D-Real's A_log."""


@dataclass(frozen=True)
class LogUniform:
    """log of values that are uniform on [low, high]: A_log of Mamba-2."""

    low: float
    high: float


@dataclass(frozen=True)
class InverseSoftplus:
    """Values whose softplus is log-uniform on [low, high]: the step sizes of Mamba."""

    low: float
    high: float


@dataclass(frozen=True)
class Orthogonal:
    """A linear layer's: rows, or columns where these are fewer, at right angles and of this length; 0: zeros."""

    length: float


@dataclass(frozen=True)
class Ramp:
    """first + (last - first) (i / (n - 1))^exponent for i = 0, ..., n - 1, along all n values of the tensor.

    To them `zigzag` times 0, 1, -1, 0, 1, -1, ... is added.
    """

    first: float
    last: float
    exponent: float = 1.0
    zigzag: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Each row along the first axis by a rule of its own."""

    starts: tuple[Ramp, ...]


Init = Constant | Normal | Uniform | LogRange | LogUniform | InverseSoftplus | Orthogonal | Ramp | Rows
