"""Limits of single configuration values, declared at a field: `skips: Annotated[int, at_least(1)] = 5`.

A limit checks one value by itself. Rules that involve several keys are in `config/check.py`, and rules between a
mixer's options are in the mixer's spec. A value of `null` satisfies every limit. In a list or dictionary, every entry
is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridtron.problems import Code, Problem, did_you_mean


class Fault(NamedTuple):
    """Reason why a value is not allowed: a code for the fault's kind, and a message."""

    code: Code
    message: str


Limit = Callable[[Any], Fault | None]  # returns the fault of a value, or None if it is allowed


def must_be(fits: Callable[[Any], bool], rule: str, note: str = "", *, code: Code = "out-of-range") -> Limit:
    """Build a limit from a function `fits`, which returns True for allowed values.

    The message for other values has the value, `rule` and `note`: `is 0, must be at least 1 (leave it out for all)`.
    """

    def fault(value: Any) -> Fault | None:
        if fits(value):
            return None
        return Fault(code, f"is {value!r}, must be {rule}{f' ({note})' if note else ''}")

    return fault


def at_least(least: float, note: str = "") -> Limit:
    return must_be(lambda value: value >= least, f"at least {least}", note)


def at_most(most: float) -> Limit:
    return must_be(lambda value: value <= most, f"at most {most}")


def above(bound: float, note: str = "") -> Limit:
    return must_be(lambda value: bound < value < math.inf, f"a number above {bound}", note)


def below_one(note: str) -> Limit:
    return must_be(lambda value: 0 <= value < 1, "at least 0 and below 1", note)


def from_zero_to_one(note: str) -> Limit:
    return must_be(lambda value: 0 <= value <= 1, "between 0 and 1", note)


def matching(pattern: str, form: str) -> Limit:
    return must_be(lambda text: re.fullmatch(pattern, text) is not None, form, code="malformed")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A limit that allows only certain names. docs/keys.md lists these names as the key's type."""

    names: Collection[str]

    def __call__(self, value: str) -> Fault | None:
        if value in self.names:
            return None
        near = did_you_mean(value, self.names)
        return Fault("unknown-name", f"is {value!r}{near}, must be one of {', '.join(self.names)}")


def one_of(names: Collection[str]) -> Limit:
    return OneOf(names)


def not_empty(cure: str) -> Limit:
    return lambda value: None if value.strip() else Fault("missing", f"is empty: {cure}")


def readable_by(parse: Callable[[str], int], least: int = 1) -> Limit:
    """Build a limit on texts: a text is allowed if `parse` returns a number of at least `least` for it."""

    def fault(text: str) -> Fault | None:
        try:
            if parse(text) >= least:
                return None
        except ValueError as error:
            return Fault("malformed", str(error))
        return Fault("out-of-range", f"is {text}, must be at least {least}")

    return fault


def possible_path(path: str) -> Fault | None:
    """Return a fault if no file can have this path, for example because the path is too long.

    The file need not exist. This function is itself a limit, for fields that hold a path.
    """
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            why = error.strerror
        else:
            why = str(error)
        return Fault("malformed", f"is {shortened(path)!r}, which can't be a path: {why}")
    return None


def path_of(text: str) -> Path:
    """Parse a path, for argparse. Raises ArgumentTypeError for a text that can't be a path."""
    if (fault := possible_path(text)) is not None:
        raise argparse.ArgumentTypeError(fault.message)
    return Path(text)


def limit_problems(value: Any, key: str = "", limits: tuple[Limit, ...] = ()) -> Iterator[Problem]:
    """Yield a problem for each value that violates a limit.

    `value` may be a single value, or a dataclass, list or dictionary, whose values are checked recursively. The limits
    of a dataclass field are in its annotation. `limits` apply to a single value, or to each entry of a list or
    dictionary. `key` is the path to `value` in the configuration.
    """
    if dataclasses.is_dataclass(value):
        inner = [(name, getattr(value, name), of_field) for name, of_field in _limits(type(value)).items()]
    elif isinstance(value, dict):
        inner = [(name, entry, limits) for name, entry in value.items()]
    elif isinstance(value, list):
        inner = [(index, entry, limits) for index, entry in enumerate(value)]
    else:
        of_value = () if value is None else limits
        yield from (Problem(key, *fault) for limit in of_value if (fault := limit(value)))
        return
    for name, member, member_limits in inner:
        yield from limit_problems(member, f"{key}.{name}" if key else str(name), member_limits)


@functools.cache
def _limits(schema: type) -> dict[str, tuple[Limit, ...]]:
    """Return the limits of a dataclass by field. Cached, because evaluating annotations is slow."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(schema)}


def disordered(options: object, low: str, high: str) -> Iterator[Problem]:
    """Yield a problem unless two options satisfy 0 < low < high."""
    least = getattr(options, low)
    most = getattr(options, high)
    if not 0 < least < most:
        yield Problem(low, "out-of-range", f"is {least}, must be above 0 and below {high}={most}")


def divisors_near(whole: int, size: int) -> list[int]:
    """Return the divisors of `whole` next to `size`: the largest below, and the smallest above, up to 2 * size.

    The list may lack either number.
    """
    divisors = [d for d in range(1, min(whole, 2 * size) + 1) if whole % d == 0]
    below = [d for d in divisors if d < size][-1:]
    above = [d for d in divisors if d > size][:1]
    return below + above


def is_folder(path: str) -> bool:
    """Return True if a folder exists. For a name that no folder can have (too long, or with a NUL), return False."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises for a name that is too long)


def shortened(text: str) -> str:
    """Shorten a very long text for a message by cutting out its middle."""
    if len(text) <= 200:
        return text
    return f"{text[:100]} ... {text[-50:]}"
