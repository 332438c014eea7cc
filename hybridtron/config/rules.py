"""Rules that many numbers of a configuration keep."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping

from hybridtron.problems import Problem

LARGEST = 2**63 - 1  # that a signed integer of 64 bits holds, as random generators and numpy take it


def at_least(least: int, values: Mapping[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: value >= least, f"must be at least {least}", values)


def above_zero(values: Mapping[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: 0 < value < math.inf, "must be a number above 0", values)


def _unless(fits: Callable[[float], bool], rule: str, values: Mapping[str, float]) -> Iterator[Problem]:
    for key, value in values.items():
        if not fits(value):
            yield Problem(key, f"is {value}, {rule}")


def divisors_near(whole: int, size: int) -> list[int]:
    """The largest divisor of a whole below a size, and the smallest above."""
    divisors = [d for d in range(1, min(whole, 2 * size) + 1) if whole % d == 0]
    below = [d for d in divisors if d < size][-1:]
    above = [d for d in divisors if d > size][:1]
    return below + above


def is_folder(path: str) -> bool:
    """Whether a folder is there; a name that no system takes (too long, with a NUL) is none."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises for a name that is too long)


def path_problems(key: str, path: str | None) -> Iterator[Problem]:
    """A path that no file can have, whether it is there or not."""
    try:
        if path is not None:
            os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        yield Problem(key, f"is {shortened(path or '')!r}, which can't be a path: {why}")


def shortened(text: str) -> str:
    """A value for a message; the middle of a very long one is left out."""
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-50:]}"
