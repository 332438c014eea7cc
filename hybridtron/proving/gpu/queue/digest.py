"""Digest of the code that a part measures: it changes when a measurement could change.

A part is a group of measurements on a GPU. Each part lists path patterns for the package's files that it measures. The
digest excludes two things:

- comments, docstrings and blank lines, so that results stay valid when only these change
- files with CPU implementations

The digest covers source text, and not a syntax tree. A tree's text depends on the Python version, and GPU machines may
have another version than this machine.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridtron.resources import PACKAGE, shipped

CPU_ALONE = ("ops/native/*", "ops/*/native.py", "ops/*/onednn.py")
DIGITS = 12
STRING = re.compile("[rRuU]?[\"']")  # beginning of a string that is neither bytes nor formatted
BASE = re.compile(r"^  - /recipe/(\S+)$", re.MULTILINE)


def digest(patterns: Sequence[str], recipes: Sequence[str] = ()) -> str:
    """Return a digest over the named recipes, and over all files that match a pattern."""
    hashed = hashlib.sha256()
    for path in files(patterns):
        hashed.update(f"{path.relative_to(PACKAGE).as_posix()}\n{code(path.read_text(encoding='utf-8'))}\n".encode())
    for name in recipes:
        hashed.update("\n".join(["", name, *recipe_lines(name)]).encode())
    return hashed.hexdigest()[:DIGITS]


def files(patterns: Iterable[str]) -> list[Path]:
    """Return the package's files that match a pattern, sorted, without CPU implementations."""
    left_out = {path for pattern in CPU_ALONE for path in PACKAGE.glob(pattern)}
    return sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)} - left_out)


@functools.cache
def code(text: str) -> str:
    """Return Python source without comments, docstrings and blank lines."""
    lines = text.splitlines()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif token.type == tokenize.NEWLINE:
            if statement and all(STRING.match(part.string) for part in statement):
                first, last = statement[0].start[0], statement[-1].end[0]
                lines[first - 1 : last] = [""] * (last - first + 1)
            statement = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def recipe_lines(name: str) -> list[str]:
    """Return the lines of the recipes that a recipe builds on, then the recipe's own lines, all without comments."""
    text = (shipped("configs") / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    below = [line for base in BASE.findall(text) for line in recipe_lines(base)]
    return below + uncommented(text)


def uncommented(text: str) -> list[str]:
    """Return the lines of a YAML text, without blank lines and lines that have only a comment."""
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
