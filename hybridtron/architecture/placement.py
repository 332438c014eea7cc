"""Placement of a sub-layer in the model: options that every mixer has, and rules for allowed positions.

A sub-layer is one residual step: norm, mixer (attention, a recurrence, an MLP), addition to the residual stream. The
layer pattern lists the sub-layers by letters. Two placements break this scheme:

    feeder             adds nothing to the stream: only the next sub-layer reads its output
    parallel branch    reads the previous sub-layer's normed input; the outputs of both are added to the stream
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from hybridtron.architecture.pattern import Pattern
from hybridtron.limits import above
from hybridtron.problems import Problem


@dataclass(frozen=True)
class Placement:
    """Placement options, which every kind of mixer has."""

    feeds_next: ClassVar[bool] = False  # True for a feeder, which reads the stream and the token embedding
    norm_after: bool = field(default=False, kw_only=True)  # apply the norm to the mixer's output instead of its input
    # parallel branch: reads the previous sub-layer's normed input; the outputs of both are added to the stream
    beside: bool = field(default=False, kw_only=True)
    output_multiplier: Annotated[float, above(0)] = field(default=1.0, kw_only=True)  # factor of the mixer's output

    @property
    def has_norm(self) -> bool:
        """True if the model has a norm for this sub-layer.

        A feeder has its norm inside its mixer, and a parallel branch shares the norm of the previous sub-layer.
        """
        return not (self.feeds_next or self.beside)


def place_problems(pattern: Pattern, specs: Mapping[str, Placement]) -> list[Problem]:
    """Return a problem for every feeder and parallel branch at a position that is not allowed.

    `specs` has the spec of each letter in the pattern.
    """
    borders = set(itertools.accumulate(pattern.stages))
    problems = []
    for index, letter in enumerate(pattern.letters):
        if index + 1 < len(pattern.letters):
            after = pattern.letters[index + 1]
        else:
            after = None
        if letter in specs and specs[letter].feeds_next:
            problems += _feeder_problems(letter, after, specs, index + 1 in borders)
        if letter in specs and specs[letter].beside:
            problems += _beside_problems(letter, pattern.letters[index - 1] if index else None, specs, index in borders)
    return list(dict.fromkeys(problems))


def _feeder_problems(
    letter: str, following: str | None, specs: Mapping[str, Placement], at_border: bool
) -> Iterator[Problem]:
    """Yield a problem unless the next sub-layer can read a feeder's output, and is in the same pipeline stage.

    Also yield a problem if the feeder's letter is '.', which weight names can't contain.
    """
    reader = specs.get(following) if following is not None else None
    what = f"has {letter}, whose output only the next sub-layer reads, "
    if following is None:
        yield Problem("model.pattern", "misplaced", f"{what}at its end: add a sub-layer after {letter}")
    elif reader is not None and (reader.feeds_next or reader.norm_after or reader.beside):
        yield Problem(
            "model.pattern",
            "misplaced",
            f"{what}before {following}, which can't read it: separate them by another letter",
        )
    elif at_border:
        yield Problem("model.pattern", "misplaced", f"{what}before a stage boundary: move the boundary before {letter}")
    if letter == ".":
        yield Problem(
            f"model.layers.{letter}",
            "unsupported",
            "has shared weights, which are named after their letter, and a name can't contain '.': use another letter",
        )


def _beside_problems(
    letter: str, before: str | None, specs: Mapping[str, Placement], at_border: bool
) -> Iterator[Problem]:
    """Yield a problem unless a parallel branch can share the previous sub-layer's norm, in the same pipeline stage."""
    spec = specs[letter]
    first = specs.get(before) if before is not None else None
    if spec.norm_after:
        yield Problem(
            f"model.layers.{letter}.beside",
            "conflict",
            "is true, which conflicts with norm_after=true: leave one of the two options out",
        )
        return
    what = f"has {letter}, which shares the normed input of the previous sub-layer, "
    if before is None:
        yield Problem("model.pattern", "misplaced", f"{what}at its start: put a sub-layer before {letter}")
    elif first is not None and first.norm_after:
        yield Problem(
            "model.pattern",
            "misplaced",
            f"{what}after {before}, whose input has no norm: separate {before} and {letter} by another letter",
        )
    elif at_border:
        yield Problem("model.pattern", "misplaced", f"{what}after a stage boundary: move the boundary after {letter}")
