"""Parsing of untrusted JSON and YAML.

A text with more than DEEPEST levels of nesting is refused, because recursive code would fail on such a value. In YAML,
an alias (`*NAME`) repeats an earlier value. Each alias is counted as the levels and characters of the value that it
repeats, because a short text could otherwise expand to a deeply nested or huge value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

DEEPEST = 100  # levels of nesting
MAX_REPEATED = 2**20  # maximum number of characters that all aliases of a YAML text repeat together
LESS = "use fewer aliases (*NAME), or divide the text into several files"


class NotParsed(ValueError):
    """Raised for text that is not JSON or YAML, or is nested too deep; the message names the fault."""


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
    """A YAML value, reduced to three properties.

    anchor: the name by which aliases can repeat the value; None if the value has no name
    levels: levels of nesting; 0 for a scalar
    size: number of characters, with each alias replaced by the value that it repeats
    """

    anchor: str | None
    levels: int
    size: int

    def add(self, inner: YamlValue) -> None:
        """Add the levels and the size of a value inside this value."""
        self.levels = max(self.levels, inner.levels + 1)
        self.size += inner.size


def _check_bounded(events: Iterable[yaml.Event]) -> None:
    """Raise NotParsed if a YAML text is nested too deep, or if its aliases repeat too much.

    This check reads the parser's events and builds no value.
    """
    # the document, then the lists and mappings that have begun but not ended, each inside the previous entry
    within = [YamlValue(None, 0, 0)]
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
        elif isinstance(event, yaml.AliasEvent) and event.anchor is not None:  # every alias has a name
            value = _repeated(event.anchor, within, named)
            repeated += value.size
            if repeated > MAX_REPEATED:
                raise NotParsed(f"repeats *{event.anchor} and others to over {MAX_REPEATED:,} characters: {LESS}")
        else:
            continue
        within[-1].add(value)
        if value.anchor is not None:
            named[value.anchor] = value


def _repeated(anchor: str, within: list[YamlValue], named: dict[str, YamlValue]) -> YamlValue:
    """Return the value that an alias repeats.

    Raises NotParsed if the alias is inside that value, or if the repeated value would be nested too deep.
    """
    if anchor in {value.anchor for value in within}:
        raise NotParsed(f"holds *{anchor} within itself; an alias can only repeat a value that has ended")
    if anchor not in named:
        return YamlValue(None, 0, 0)  # an unknown alias: the YAML library reports it later, with the line
    if len(within) - 1 + named[anchor].levels > DEEPEST:
        raise NotParsed(f"is nested more than {DEEPEST} deep by the value of *{anchor}: use fewer levels")
    return named[anchor]
