"""Placement of a sub-layer among the others: options that every mixer has, and rules for allowed positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from hybridtron.architecture.pattern import Pattern
from hybridtron.limits import above
from hybridtron.problems import Problem


@dataclass(frozen=True)
class PlaceSpec:
    """Placement options, which every kind of mixer has."""

    feeds_next: ClassVar[bool] = False  # a feeder: reads stream and embedding; only the next sub-layer reads its output
    norm_after: bool = field(default=False, kw_only=True)  # norm the mixer's output instead of its input
    # parallel branch: shares the norm and the input of the previous sub-layer; both outputs are added to the stream
    beside: bool = field(default=False, kw_only=True)
    output_multiplier: Annotated[float, above(0)] = field(default=1.0, kw_only=True)  # factor of the mixer's output

    @property
    def has_norm(self) -> bool:
        """True if the stack has a norm for this sub-layer."""
        return not (self.feeds_next or self.beside)


def place_problems(pattern: Pattern, specs: Mapping[str, PlaceSpec]) -> list[Problem]:
    """List sub-layers at positions where they are not allowed."""
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
    letter: str, following: str | None, specs: Mapping[str, PlaceSpec], at_border: bool
) -> Iterator[Problem]:
    """Check that a feeder's output has a reader: the next sub-layer, in the same stage."""
    reader = specs.get(following) if following is not None else None
    what = f"has {letter}, whose output the next sub-layer alone reads, "
    if following is None:
        yield Problem("model.pattern", "misplaced", f"{what}at its end: put another behind it")
    elif reader is not None and (reader.feeds_next or reader.norm_after or reader.beside):
        yield Problem("model.pattern", "misplaced", f"{what}before {following}, which can't: put another between them")
    elif at_border:
        yield Problem("model.pattern", "misplaced", f"{what}before a stage border: move the border")
    if letter == ".":
        yield Problem(
            f"model.layers.{letter}",
            "unsupported",
            "cannot be used for a letter with shared weights: choose another letter",
        )


def _beside_problems(
    letter: str, before: str | None, specs: Mapping[str, PlaceSpec], at_border: bool
) -> Iterator[Problem]:
    """Check that a parallel branch can share the norm of the previous sub-layer, in the same stage."""
    spec = specs[letter]
    first = specs.get(before) if before is not None else None
    if spec.norm_after:
        yield Problem(
            f"model.layers.{letter}.beside",
            "conflict",
            "is true, which does not go with norm_after: leave one of them out",
        )
        return
    what = f"has {letter}, which reads what the sub-layer before it reads, "
    if before is None:
        yield Problem("model.pattern", "misplaced", f"{what}at its start: put another before it")
    elif first is not None and first.norm_after:
        yield Problem(
            "model.pattern",
            "misplaced",
            f"{what}behind {before}, which has no norm before it: put another between them",
        )
    elif at_border:
        yield Problem("model.pattern", "misplaced", f"{what}behind a stage border: move the border")
