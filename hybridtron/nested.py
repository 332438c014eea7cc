"""Parsing of untrusted JSON and YAML. Texts nested deeper than DEEPEST are refused, since recursive code would fail."""

from __future__ import annotations

import json
from typing import Any

import yaml

DEEPEST = 100  # levels of nesting


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
    depth = 0
    within: list[str | None] = []  # anchors of the open collections
    try:
        for event in yaml.parse(stored, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                within.append(event.anchor)
                depth = max(depth, len(within))
            elif isinstance(event, yaml.CollectionEndEvent):
                within.pop()
            elif isinstance(event, yaml.AliasEvent) and event.anchor in within:
                raise NotParsed(f"holds *{event.anchor} within itself")
            if depth > DEEPEST:
                raise NotParsed(f"is nested more than {DEEPEST} deep")
        return yaml.safe_load(stored)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, NotParsed):
            raise
        raise NotParsed(f"is not YAML: {error}") from error
