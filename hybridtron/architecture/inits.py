"""Initialisation rules of weights, as dataclasses without torch. `model/init.py` fills tensors by these rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A single value for all elements."""

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
    """Uniform initialisation for a projection.

    The class marks the weights that get another initialisation under `model.init: lit_gpt`.
    """


@dataclass(frozen=True)
class OutputProjection(Uniform):
    """Uniform initialisation for a sub-layer's output projection.

    The class marks the weights that get another initialisation under `model.init: lit_gpt`.
    """


@dataclass(frozen=True)
class LogRange:
    """Logarithms of 1, 2, ..., n along the last axis, whose size is n: Mamba-1's A_log, as in S4D-Real."""


@dataclass(frozen=True)
class LogUniform:
    """Logarithms of values drawn uniformly from [low, high]: Mamba-2's A_log."""

    low: float
    high: float


@dataclass(frozen=True)
class InverseSoftplus:
    """Values whose softplus is log-uniform on [low, high]: Mamba's dt_bias."""

    low: float
    high: float


@dataclass(frozen=True)
class Orthogonal:
    """Orthogonal rows (or columns, if there are fewer columns than rows), each with L2 norm `length`.

    Length 0 means zeros.
    """

    length: float


@dataclass(frozen=True)
class Ramp:
    """Deterministic values from `first` to `last` over the flattened tensor, along a power of the index.

    Element i of n is first + (last - first) * (i / (n - 1))^exponent, plus `zigzag` times 0, 1, -1, 0, 1, -1, ...
    """

    first: float
    last: float
    exponent: float = 1.0
    zigzag: float = 0.0


@dataclass(frozen=True)
class Rows:
    """A separate ramp for each index on the first axis."""

    starts: tuple[Ramp, ...]


@dataclass(frozen=True)
class RowFactors:
    """Values of another rule, multiplied by a factor for each block of consecutive rows.

    `blocks` has a pair (number of rows, factor) for each block, in order.
    """

    init: Normal | Uniform
    blocks: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EachExpert:
    """Values of another rule for each index of the first axis, drawn with a seed of the index's own.

    So the values of an expert do not depend on how many experts there are.
    """

    init: Normal | Uniform


Init = (
    Constant
    | Normal
    | Uniform
    | LogRange
    | LogUniform
    | InverseSoftplus
    | Orthogonal
    | Ramp
    | Rows
    | RowFactors
    | EachExpert
)
