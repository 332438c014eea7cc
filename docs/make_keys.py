"""Writes `docs/keys.md`, the reference of all configuration keys, from the schema's dataclasses and the mixers' specs.

The meaning of a key is the comment at its field: at the end of the line, or on the lines above it. `make reference`
runs this; a test compares the result with the file that is in the repository.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import io
import json
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from omegaconf import MISSING

from hybridtron.architecture import SPECS
from hybridtron.config.schema import Config
from hybridtron.limits import OneOf

PAGE = Path(__file__).with_name("keys.md")
HEAD = """# All keys

Written by `make reference` from `hybridtron/config/schema.py`, `phase_schema.py`, `cluster.py` and the mixers' specs in
`hybridtron/architecture/`; do not edit it. Each key can be set in a recipe and on the command line (`optim.clip=0.5`).
*required* marks keys without a default: the recipe, or the command line, has to set them. `null` means "not set".
"""
MIXERS = """## model.layers.LETTER

What a letter of the pattern means: `kind`, and the options of that kind.
"""
TABLE = "| key | type | default | meaning |\n|---|---|---|---|\n"
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}
PLAIN[typing.Any] = "text or mapping"


def page() -> str:
    """The text of `docs/keys.md`."""
    sections = [section(f.name, hints(Config)[f.name]) for f in dataclasses.fields(Config)]
    letters = [f"### kind: {kind}\n\n{TABLE}{''.join(rows(spec, ''))}" for kind, spec in sorted(SPECS.items())]
    return "\n".join([HEAD, *sections, MIXERS, *letters])


def section(name: str, hint: object) -> str:
    """One top-level key with all keys below it."""
    schema = inner_schema(hint)
    assert schema is not None
    place = name if schema is hint else f"{name}.N"
    return f"## {place}\n\n{inspect.getdoc(schema)}\n\n{TABLE}{''.join(rows(schema, f'{place}.'))}"


def rows(schema: type, prefix: str) -> Iterator[str]:
    """A line for each key, those of nested schemas after the key that holds them."""
    meanings = comments(schema)
    for f in dataclasses.fields(schema):
        hint = hints(schema)[f.name]
        below = inner_schema(hint)
        key = f"{prefix}{public(f.name)}"
        if below is not None and hint is below:
            yield from rows(below, f"{key}.")
            continue
        meaning = meanings.get(f.name) or meaning_elsewhere(key)
        assert meaning, f"{schema.__name__}.{f.name} has no comment that says what it means"
        yield f"| `{key}` | {in_words(hint, choices(schema, f.name))} | {default(f)} | {meaning} |\n"
        if below is not None:
            yield from rows(below, f"{key}.{'NAME.' if typing.get_origin(hint) is dict else ''}")


def meaning_elsewhere(key: str) -> str:
    """A field of a phase that overrides a section's field means what it means there."""
    phase = "phases.N."
    if not key.startswith(phase):
        return ""
    overridden = key.removeprefix(phase)
    schema: type | None = Config
    for name in overridden.split("."):
        if schema is None or name not in hints(schema):
            return ""
        schema = inner_schema(hints(schema)[name])
    return f"overrides `{overridden}` in this phase"


def public(name: str) -> str:
    """The name on the command line, where Python has a keyword of that name."""
    return "async" if name == "asynchronous" else name


def inner_schema(hint: object) -> type | None:
    """The dataclass in a type such as `X`, `X | None`, `list[X]` or `dict[str, X]`."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and isinstance(candidate, type):
            return candidate
    return None


def choices(schema: type, name: str) -> str:
    """List the names that a text can be set to, as the field's limit has them."""
    hint = typing.get_type_hints(schema, include_extras=True)[name]
    limits = getattr(hint, "__metadata__", ())
    return ", ".join(f"`{choice}`" for limit in limits if isinstance(limit, OneOf) for choice in limit.names)


def in_words(hint: object, names: str = "") -> str:
    """A type as a reader of YAML knows it; `names` are those that a text can be set to."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join(in_words(one, names) for one in arguments)
    if hint is str and names:
        return names
    if typing.get_origin(hint) is list:
        return f"list of {in_words(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    return "mapping" if inner_schema(hint) else PLAIN[typing.cast(type, hint)]


def default(f: dataclasses.Field[typing.Any]) -> str:
    """A default as YAML has it."""
    value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    if isinstance(value, str) and value == MISSING:
        return "*required*"
    if isinstance(value, enum.Enum):
        value = value.value
    plain = value is None or isinstance(value, bool | dict)
    return f"`{json.dumps(value) if plain else value}`"


def comments(schema: type) -> dict[str, str]:
    """The comment of each field, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if dataclasses.is_dataclass(base):
            found |= own_comments(textwrap.dedent(inspect.getsource(base)))
    return found


def own_comments(source: str) -> dict[str, str]:
    """The comment at the end of each field's line, after those on the lines above."""
    lines = source.splitlines()
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            held = (by_line[line] for line in range(first, (node.end_lineno or first) + 1) if line in by_line)
            found[node.target.id] = " ".join(held).replace("|", r"\|")
    return found


def hints(schema: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(schema)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}: {page().count(chr(10) + '| `')} keys\n")
