"""Parsing of untrusted JSON and YAML.

Texts nested deeper than DEEPEST are refused, since recursive code would fail. YAML's aliases count as the values that
they repeat, so that a short text can't stand for a deep or huge one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

DEEPEST = 100  # levels of nesting
MOST_REPEATED = 2**20  # characters that a YAML text's aliases repeat, all together
LESS = "name values by &NAME and *NAME less often, or write several files"


class NotParsed(ValueError):
    """Raised for text that is not JSON or YAML, or is nested too deep; the message says which."""


def json_of(stored: bytes | str) -> Any:
    """Parse a JSON text. Raises NotParsed."""
    try:
        parsed = json.loads(stored)
    except RecursionError as error:
        raise NotParsed(f"is nested more than {DEEPEST} deep") from error
    except ValueError as error:
        raise NotParsed(f"is not JSON: {error}") from error
    level = [parsed]
    for _ in range(DEEPEST + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [entry for entries in inner for entry in entries]
        if not level:
            return parsed
    raise NotParsed(f"is nested more than {DEEPEST} deep")


def yaml_of(stored: bytes | str) -> Any:
    """Parse a YAML text. Raises NotParsed."""
    try:
        _check_bounded(yaml.parse(stored, Loader=yaml.SafeLoader))
        return yaml.safe_load(stored)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, NotParsed):
            raise
        raise NotParsed(f"is not YAML: {error}") from error


@dataclass
class YamlValue:
    """A YAML value's anchor, levels of nesting (0 for a scalar), and size in characters with aliases written out."""

    anchor: str | None
    levels: int
    size: int

    def add(self, inner: YamlValue) -> None:
        """Count a value within this one."""
        self.levels = max(self.levels, inner.levels + 1)
        self.size += inner.size


def _check_bounded(events: Iterable[yaml.Event]) -> None:
    """Check the nesting, and the size that aliases add, without building any value. Raises NotParsed."""
    within = [YamlValue(None, 0, 0)]  # the document, and its collections that are open
    named: dict[str, YamlValue] = {}
    repeated = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            within.append(YamlValue(event.anchor, 1, 1))
            if len(within) > DEEPEST + 1:
                raise NotParsed(f"is nested more than {DEEPEST} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            value = within.pop()
        elif isinstance(event, yaml.ScalarEvent):
            value = YamlValue(event.anchor, 0, len(event.value) + 1)
        elif isinstance(event, yaml.AliasEvent):
            value = _repeated(event.anchor, within, named)
            repeated += value.size
            if repeated > MOST_REPEATED:
                raise NotParsed(f"repeats *{event.anchor} and others to more than {MOST_REPEATED:,} characters; {LESS}")
        else:
            continue
        within[-1].add(value)
        if value.anchor is not None:
            named[value.anchor] = value


def _repeated(anchor: str, within: list[YamlValue], named: dict[str, YamlValue]) -> YamlValue:
    """Return the value that an alias repeats. Raises NotParsed if it has not ended, or would be nested too deep."""
    if anchor in {value.anchor for value in within}:
        raise NotParsed(f"holds *{anchor} within itself; an alias can only repeat a value that has ended")
    if anchor not in named:
        return YamlValue(None, 0, 0)  # the YAML library's message names the line
    if len(within) - 1 + named[anchor].levels > DEEPEST:
        raise NotParsed(f"is nested more than {DEEPEST} deep by *{anchor}; write its value out with fewer levels")
    return named[anchor]
