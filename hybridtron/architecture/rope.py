"""Options for rotary positions: the base of their angles, and how angles are scaled for longer rows.

Rotary positions (RoPE) rotate pairs of a head's channels. Pair i of a token is rotated by the angle position * f_i,
with the frequency f_i = base^(-2 i / channels), where `channels` counts the rotated channels. A scale lowers
frequencies, so that a model that was trained with rows (sequences) of `original` tokens can read rows `factor` times as
long:

    linear   f_i / factor for all pairs: positions are interpolated. Chen et al. 2023
    yarn     f_i for pairs that rotate more than `fast` times in `original` tokens; f_i / factor for pairs that rotate
             fewer than `slow` times; for other pairs, a value between these two, linear in the pair's index. cos and
             sin are multiplied by `attention`. Peng et al. 2023
    llama3   f_i for pairs that rotate more than `high` times in `original` tokens; f_i / factor for pairs that rotate
             fewer than `low` times; for other pairs, a value between these two, linear in the rotation count. Llama 3.1

Each scale equals transformers' `rope_type` with the same name. No weight depends on these options, so a training phase
may change them. `ops/rope` computes the frequencies.

Self-Extend (Jin et al. 2024) changes no frequency, but reduces positions, and only outside training. Keys that are at
least `neighbours` tokens away are rotated by floor(position / group). For the scores with these far keys, queries are
rotated by floor(position / group) + neighbours - floor(neighbours / group). So the differences between the positions of
a query and its far keys begin at about `neighbours`, where the differences for near keys end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hybridtron.limits import above, at_least, disordered, one_of
from hybridtron.problems import Problem

FORMER = "rope_base"  # former option, still accepted: the base alone, or null for no positions
NO_POSITIONS = "none"
# the options that each scale uses
OF_SCALE = {
    "linear": ("factor",),
    "yarn": ("factor", "original", "fast", "slow", "attention", "truncate"),
    "llama3": ("factor", "original", "low", "high"),
}


@dataclass(frozen=True)
class RopeOptions:
    """Options for a letter's rotary positions."""

    base: Annotated[float, above(1)] = 10000.0  # base of the angles
    # how angles are scaled for longer rows: linear, yarn or llama3; null: no scaling
    scale: Annotated[str | None, one_of(tuple(OF_SCALE))] = None
    # new row length divided by `original`; required with every scale
    factor: Annotated[float | None, at_least(1)] = None
    # row length, in tokens, that the model was trained with before; required with yarn and llama3
    original: Annotated[int | None, at_least(1)] = None
    # llama3: the frequencies of pairs with fewer rotations in `original` tokens are divided by `factor`
    low: Annotated[float, above(0)] = 1.0
    high: Annotated[float, above(0)] = 4.0  # llama3: pairs with more rotations keep their frequency
    fast: Annotated[float, above(0)] = 32.0  # yarn: pairs with more rotations keep their frequency
    slow: Annotated[float, above(0)] = 1.0  # yarn: frequencies of pairs with fewer rotations are divided by `factor`
    # yarn: factor of cos and sin, and so of queries and keys; null: 0.1 ln(factor) + 1
    attention: Annotated[float | None, above(0)] = None
    truncate: bool = True  # yarn: round the range of interpolated pair indices outwards, to integer limits

    @property
    def attention_factor(self) -> float:
        """Factor that multiplies cos and sin."""
        if self.scale != "yarn" or self.factor is None:
            return 1.0
        if self.attention is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention

    def chosen(self) -> dict[str, Any]:
        """Return the base, and the other options that differ from their defaults."""
        pairs = ((f.name, f.default, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, default, value in pairs if name == "base" or value != default}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {value}" for name, value in self.chosen().items()) + "}"

    def problems(self) -> Iterator[Problem]:
        """Yield problems with options that do not fit together."""
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
    """Options for Self-Extend, for full attention outside training."""

    group: Annotated[int, at_least(2)] = 4  # number of consecutive far tokens that share a position
    neighbours: Annotated[int, at_least(1)] = 1024  # distance in tokens; smaller distances stay as in training


def with_rope(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a letter's options with the former key `rope_base` moved into `rope`.

    Raises ValueError if both set a base.
    """
    renamed = dict(options)
    if FORMER not in renamed:
        return renamed
    base = renamed.pop(FORMER)
    rope = renamed.get("rope", {})
    if isinstance(rope, Mapping) and "base" not in rope:
        return {**renamed, "rope": NO_POSITIONS if base is None and not rope else {"base": base, **rope}}
    raise ValueError(f"is {base}, the former name of rope.base, but rope is set too: leave {FORMER} out")
