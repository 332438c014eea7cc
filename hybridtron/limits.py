"""What a key or an option can be set to, declared at its field: `skips: Annotated[int, at_least(1)] = 5`.

A limit knows one value and nothing else. Rules between keys stand in `config/check.py`, those between the options of a
mixer in its spec. `null`, where a type has it, keeps every limit; in a list, each entry is held to it.
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
from typing import Any

from hybridtron.problems import Problem, did_you_mean

Limit = Callable[[Any], str | None]  # what is wrong with a value, None where it fits


def must_be(fits: Callable[[Any], bool], rule: str, note: str = "") -> Limit:
    """`is 0, must be at least 1 (leave it out for all)`."""
    return lambda value: None if fits(value) else f"is {value!r}, must be {rule}{f' ({note})' if note else ''}"


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
    return must_be(lambda text: re.fullmatch(pattern, text) is not None, form)


def one_of(names: Collection[str]) -> Limit:
    def wrong(value: str) -> str | None:
        near = did_you_mean(value, names)
        return None if value in names else f"is {value!r}{near}, must be one of {', '.join(names)}"

    return wrong


def not_empty(cure: str) -> Limit:
    return lambda value: None if value.strip() else f"is empty: {cure}"


def readable_by(parse: Callable[[str], int], least: int = 1) -> Limit:
    """Text that a function reads as a number of at least `least`."""

    def wrong(text: str) -> str | None:
        try:
            return None if parse(text) >= least else f"is {text}, must be at least {least}"
        except ValueError as error:
            return str(error)

    return wrong


def possible_path(path: str) -> str | None:
    """A path that some file can have, whether it is there or not."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return f"is {shortened(path)!r}, which can't be a path: {why}"
    return None


def path_of(text: str) -> Path:
    """A path of a command line, for argparse: one that some file can have."""
    if (wrong := possible_path(text)) is not None:
        raise argparse.ArgumentTypeError(wrong)
    return Path(text)


def limit_problems(value: Any, key: str = "", limits: tuple[Limit, ...] = ()) -> Iterator[Problem]:
    """What is refused of a value, or of all that a dataclass, list or dictionary holds, with their keys."""
    if dataclasses.is_dataclass(value):
        inner = [(name, getattr(value, name), of_field) for name, of_field in _limits(type(value)).items()]
    elif isinstance(value, dict):
        inner = [(name, entry, limits) for name, entry in value.items()]
    elif isinstance(value, list):
        inner = [(index, entry, limits) for index, entry in enumerate(value)]
    else:
        of_value = () if value is None else limits
        yield from (Problem(key, wrong) for limit in of_value if (wrong := limit(value)))
        return
    for name, each, of_each in inner:
        yield from limit_problems(each, f"{key}.{name}" if key else str(name), of_each)


@functools.cache
def _limits(schema: type) -> dict[str, tuple[Limit, ...]]:
    """Those of each field; evaluating annotations takes longer than all else here."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(schema)}


def disordered(options: object, low: str, high: str) -> Iterator[Problem]:
    """Two options that are the ends of a range above 0, where they are none."""
    least, most = getattr(options, low), getattr(options, high)
    if not 0 < least < most:
        yield Problem(low, f"is {least}, must be above 0 and below {high}={most}")


def divisors_near(whole: int, size: int) -> list[int]:
    """The largest divisor of a whole below a size, and the smallest above."""
    divisors = [d for d in range(1, min(whole, 2 * size) + 1) if whole % d == 0]
    below = [d for d in divisors if d < size][-1:]
    above = [d for d in divisors if d > size][:1]
    return below + above


def is_folder(path: str) -> bool:
    """Whether a folder is there; a name that no system takes (too long, with a NUL) is none."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises for a name that is too long)


def shortened(text: str) -> str:
    """A value for a message; the middle of a very long one is left out."""
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-50:]}"
