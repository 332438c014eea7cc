"""Marks parameters of tests as slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return values as a test's parameters: those that are not among `fast` are left to the slow tests."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=[pytest.mark.slow] * (value not in fast))
        for value in values
    ]
