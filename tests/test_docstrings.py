"""Docstrings begin as a reader expects, with a verb or a noun, and their first sentence has at most one clause more."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hybridtron"
RIDDLE = re.compile(r"(?:What|Of|Those|The same|That|Whether|As|By|How|Where|None)\b")
RELATIVE = re.compile(r"\b(?:that|which|who|whose|what|where)\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.:;])\s|\n\n")


def riddles(path: Path) -> list[str]:
    """List a file's docstrings of the wrong shape, each with the place where it stands."""
    places = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        first = SENTENCE_END.split(text)[0]
        if RIDDLE.match(text) or len(RELATIVE.findall(first)) > 1:
            places.append(f"{path.relative_to(PACKAGE)} {getattr(node, 'name', 'module')}: {first}")
    return places


@pytest.mark.parametrize("room", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}))
def test_docstrings_begin_with_a_verb_or_a_noun(room: str) -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] == room]
    lines = [line for path in paths for line in riddles(path)]
    assert lines == []
