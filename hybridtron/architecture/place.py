"""How a sub-layer stands among the others: options that every kind of mixer has, and rules of what may stand where."""

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
    """Options of a letter of the pattern beside those of its mixer."""

    feeds_next: ClassVar[bool] = False  # it reads stream and embedding, and the next sub-layer alone its output
    norm_after: bool = field(default=False, kw_only=True)  # what it adds is normed, instead of what it reads
    # it has no norm of its own: it reads what the sub-layer before it reads, and both outputs are added together
    beside: bool = field(default=False, kw_only=True)
    output_multiplier: Annotated[float, above(0)] = field(default=1.0, kw_only=True)  # what it adds is multiplied by it

    @property
    def has_norm(self) -> bool:
        """Whether the stack has a norm for it."""
        return not (self.feeds_next or self.beside)


def place_problems(pattern: Pattern, specs: Mapping[str, PlaceSpec]) -> list[Problem]:
    """What stands where it can't."""
    borders = set(itertools.accumulate(pattern.stages))
    found = []
    for at, letter in enumerate(pattern.letters):
        after = pattern.letters[at + 1] if at + 1 < len(pattern.letters) else None
        if letter in specs and specs[letter].feeds_next:
            found += _feeder_problems(letter, after, specs, at + 1 in borders)
        if letter in specs and specs[letter].beside:
            found += _beside_problems(letter, pattern.letters[at - 1] if at else None, specs, at in borders)
    return list(dict.fromkeys(found))


def _feeder_problems(
    letter: str, following: str | None, specs: Mapping[str, PlaceSpec], at_border: bool
) -> Iterator[Problem]:
    """What a feeder has made, the next sub-layer reads: there must be one that can, in the same stage."""
    reader = specs.get(following) if following is not None else None
    what = f"has {letter}, whose output the next sub-layer alone reads, "
    if following is None:
        yield Problem("model.pattern", f"{what}at its end: put another behind it")
    elif reader is not None and (reader.feeds_next or reader.norm_after or reader.beside):
        yield Problem("model.pattern", f"{what}before {following}, which can't: put another between them")
    elif at_border:
        yield Problem("model.pattern", f"{what}before a stage border: move the border")
    if letter == ".":
        yield Problem(f"model.layers.{letter}", "names weights that its places share: use another letter")


def _beside_problems(
    letter: str, before: str | None, specs: Mapping[str, PlaceSpec], at_border: bool
) -> Iterator[Problem]:
    """A sub-layer without a norm reads what the one before it reads: there must be one with a norm, in its stage."""
    spec, first = specs[letter], specs.get(before) if before is not None else None
    if spec.norm_after:
        yield Problem(
            f"model.layers.{letter}.beside", "is true, which does not go with norm_after: leave one of them out"
        )
        return
    what = f"has {letter}, which reads what the sub-layer before it reads, "
    if before is None:
        yield Problem("model.pattern", f"{what}at its start: put another before it")
    elif first is not None and first.norm_after:
        yield Problem("model.pattern", f"{what}behind {before}, which has no norm before it: put another between them")
    elif at_border:
        yield Problem("model.pattern", f"{what}behind a stage border: move the border")
