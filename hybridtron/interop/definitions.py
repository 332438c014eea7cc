"""Top-level definitions of the package's files, and the global names that each uses: what `shipped` puts together."""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
HOME = "hybridtron."


class DefinedName(NamedTuple):
    """A file of the package, as `ops.scan.reference`, and a name that it defines."""

    module: str
    name: str


class Use(NamedTuple):
    """A global name in a definition, and where its text stands."""

    name: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class SourceFile:
    """A file of the package: its lines, its definitions, and where the names that it imports come from."""

    module: str
    lines: list[str]
    definitions: dict[str, ast.stmt]
    own_imports: dict[str, DefinedName]  # from the package, by the name here
    foreign_imports: dict[str, str]  # all others, as a statement
    globals: list[Use]  # of all definitions, annotations among them

    @staticmethod
    @cache
    def of(module: str) -> SourceFile:
        path = PACKAGE / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        tree = ast.parse(text)
        # without "from __future__ import annotations" the compiler looks up what annotations name, too
        evaluated = [n for n in tree.body if not (isinstance(n, ast.ImportFrom) and n.module == "__future__")]
        code = compile(ast.Module(evaluated, []), str(path), "exec", dont_inherit=True)
        found = SourceFile(module, text.splitlines(), {}, {}, {}, sorted(set(_globals(code))))
        for node in tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.definitions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.definitions[name] = node
                case ast.ImportFrom(module=str(origin)) if origin.startswith(HOME):
                    places = {a.asname or a.name: DefinedName(origin.removeprefix(HOME), a.name) for a in node.names}
                    found.own_imports.update(places)
                case ast.Import() | ast.ImportFrom():
                    found.foreign_imports.update({a.asname or a.name: _statement(node, a) for a in node.names})
        return found

    def lines_of(self, name: str) -> range:
        """The numbers of a definition's lines, its decorators' among them."""
        node = self.definitions[name]
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        return range(first, (node.end_lineno or first) + 1)

    def uses(self, name: str) -> list[Use]:
        """The global names that a definition uses."""
        lines = self.lines_of(name)
        return [use for use in self.globals if use.line in lines]

    def call(self, name: str, function: str) -> ast.Call | None:
        """The call that a name is defined by, if it is one of this function: `NAME = function(...)`."""
        match self.definitions.get(name):
            case ast.Assign(value=ast.Call(func=ast.Name(id=called)) as call) if called == function:
                return call
        return None


def is_module(module: str) -> bool:
    path = PACKAGE / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _statement(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
    return f"from {node.module} import {name}" if isinstance(node, ast.ImportFrom) else f"import {name}"


def _globals(code: CodeType) -> Iterator[Use]:
    """Names that code looks up in the module, as the compiler found them; the fields of a class are none."""
    instructions = list(dis.get_instructions(code))
    fields = {each.argval for each in instructions if each.opname == "STORE_NAME" and code.co_name != "<module>"}
    others = {*dir(builtins), "__annotations__", *fields}
    for each in instructions:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval not in others:
            position: Any = each.positions
            yield Use(each.argval, position.lineno, position.col_offset, position.end_col_offset)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
