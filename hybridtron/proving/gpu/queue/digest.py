"""Digest of the code that a part measures: it changes exactly when a measurement could change.

A part names files of the package by patterns. Comments, docstrings and blank lines are left out, so that edits of them
keep a result valid. Files of CPU implementations are left out too. The digest covers source text instead of a syntax
tree, because a tree differs between Python versions, and results come from machines with another version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridtron.shipped import PACKAGE, shipped

CPU_ALONE = ("ops/native/*", "ops/*/native.py", "ops/*/onednn.py")
DIGITS = 12
BASE = re.compile(r"^  - /recipe/(\S+)$", re.MULTILINE)


def digest(patterns: Sequence[str], recipes: Sequence[str] = ()) -> str:
    """Return the digest of all files that match, and of these recipes' text."""
    hashed = hashlib.sha256()
    for path in files(patterns):
        hashed.update(f"{path.relative_to(PACKAGE).as_posix()}\n{code(path.read_text(encoding='utf-8'))}\n".encode())
    for name in recipes:
        hashed.update("\n".join(["", name, *recipe_lines(name)]).encode())
    return hashed.hexdigest()[:DIGITS]


def files(patterns: Iterable[str]) -> list[Path]:
    """Return the package's files that match a pattern, in order, without CPU implementations."""
    left_out = {path for pattern in CPU_ALONE for path in PACKAGE.glob(pattern)}
    return sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)} - left_out)


@functools.cache
def code(text: str) -> str:
    """Return Python source without comments, docstrings and blank lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def recipe_lines(name: str) -> list[str]:
    """Return a recipe's lines without comments, after those of the recipes that it builds on."""
    text = (shipped("configs") / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    below = [line for base in BASE.findall(text) for line in recipe_lines(base)]
    return below + [line.rstrip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
