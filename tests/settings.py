"""Command lines of tests: single settings, and sequences of settings that several cases share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Setting = str | Sequence[str]
"""One setting, such as `model.width=32`, or several."""


def flat(settings: Iterable[Setting]) -> list[str]:
    """Return all settings as one list, in their order."""
    arguments: list[str] = []
    for setting in settings:
        if isinstance(setting, str):
            arguments.append(setting)
        else:
            arguments.extend(setting)
    return arguments
