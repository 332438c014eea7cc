"""Options of rotary positions: the base of their angles, and how angles are scaled for longer rows.

    angle of pair i = position * f_i,   f_i = base^(-2 i / channels)   without a scale
    linear   f_i / factor: positions are interpolated. Chen et al. 2023
    yarn     f_i for pairs that rotate more than `fast` times in `original` tokens, f_i / factor for those below `slow`
             times, linear in the pair's index between; cos and sin times `attention`. Peng et al. 2023
    llama3   f_i for pairs that rotate more than `high` times in `original` tokens, f_i / factor for those below `low`
             times, linear in the number of rotations between. Llama 3.1

Each scale is that of transformers' `rope_type` with the same name. No weight depends on them, so a phase may change all
of these options. `ops/rope` computes the frequencies.

Self-Extend (Jin et al. 2024) changes no frequency: outside training, keys at a distance of `neighbours` tokens or more
are rotated by floor(position / group), and the queries that read them by floor(position / group) + neighbours -
floor(neighbours / group), so that far distances begin where near ones end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hybridtron.limits import above, at_least, disordered, one_of
from hybridtron.problems import Problem

FORMER = "rope_base"  # former key: the base alone, or null for no positions
NO_POSITIONS = "none"
OF_SCALE = {
    "linear": ("factor",),
    "yarn": ("factor", "original", "fast", "slow", "attention", "truncate"),
    "llama3": ("factor", "original", "low", "high"),
}


@dataclass(frozen=True)
class RopeOptions:
    """Options of a letter's rotary positions."""

    base: Annotated[float, above(1)] = 10000.0  # base of the angles
    # how angles are scaled for longer rows: linear, yarn or llama3; null: no scaling
    scale: Annotated[str | None, one_of(tuple(OF_SCALE))] = None
    # new row length divided by `original`; needed by every scale
    factor: Annotated[float | None, at_least(1)] = None
    # row length, in tokens, that the model was trained on before; needed by yarn and llama3
    original: Annotated[int | None, at_least(1)] = None
    # llama3: pairs with fewer rotations in `original` tokens are slowed by the full factor
    low: Annotated[float, above(0)] = 1.0
    high: Annotated[float, above(0)] = 4.0  # llama3: pairs with more rotations are unchanged
    fast: Annotated[float, above(0)] = 32.0  # yarn: pairs with more rotations are unchanged
    slow: Annotated[float, above(0)] = 1.0  # yarn: pairs with fewer rotations are slowed by the full factor
    # yarn: factor of queries and keys; null: 0.1 ln(factor) + 1
    attention: Annotated[float | None, above(0)] = None
    truncate: bool = True  # yarn: round both ends of the ramp outwards to integer pairs

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        if self.scale != "yarn" or self.factor is None:
            return 1.0
        if self.attention is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention

    def chosen(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the base."""
        pairs = ((f.name, f.default, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, default, value in pairs if name == "base" or value != default}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {value}" for name, value in self.chosen().items()) + "}"

    def problems(self) -> Iterator[Problem]:
        """Yield problems of options that are within their limits but don't fit together."""
        chosen = self.chosen()
        used = OF_SCALE.get(self.scale or "", ())
        for name in [name for name in chosen if name not in ("base", "scale", *used)]:
            owners = [scale for scale, names in OF_SCALE.items() if name in names]
            if self.scale:
                fact = f"scale is {self.scale}"
            else:
                fact = "there is no scale"
            yield Problem(
                name, "no-effect", f"is {chosen[name]}, but {fact}: leave it out, or use scale={' or '.join(owners)}"
            )
        meanings = {"factor": "how many times as long rows are to be, such as 4.0", "original": "as in original=8192"}
        for name, meaning in meanings.items():
            if name in used and getattr(self, name) is None:
                yield Problem(name, "missing", f"must be set for scale={self.scale}: {meaning}")
        yield from disordered(self, "low", "high")
        yield from disordered(self, "slow", "fast")


PLAIN = RopeOptions()


@dataclass(frozen=True)
class SelfExtendOptions:
    """Options of Self-Extend, for full attention outside training."""

    group: Annotated[int, at_least(2)] = 4  # number of far tokens that share a position
    neighbours: Annotated[int, at_least(1)] = 1024  # distances below this stay as in training


def with_rope(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a letter's options with the former key renamed to `rope`. Raises ValueError if both set a base."""
    renamed = dict(options)
    if FORMER not in renamed:
        return renamed
    base = renamed.pop(FORMER)
    rope = renamed.get("rope", {})
    if isinstance(rope, Mapping) and "base" not in rope:
        return {**renamed, "rope": NO_POSITIONS if base is None and not rope else {"base": base, **rope}}
    raise ValueError(f"is {base}, the former name of rope.base, but rope is set too: leave {FORMER} out")
