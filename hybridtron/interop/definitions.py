"""Parses this package's source files into top-level definitions, and finds the global names that each of them uses.

`shipped_code` copies such definitions into a generated file with all mixers (attention, Mamba, MLP, ...). The generated
file is exported with models of the custom class. Global names are taken from compiled bytecode: there, Python has
already decided which names are local and which are global.
"""

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
    """A name that a module defines; `module` is the module's path in the package, such as `ops.scan.reference`."""

    module: str
    name: str


class Use(NamedTuple):
    """A use of a global name: the line, counted from 1, and the start and end columns in bytes."""

    name: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class SourceFile:
    """A parsed source file from the package.

    module: path in the package, such as `ops.scan`
    lines: the file's lines
    definitions: name -> top-level function, class or assignment
    own_imports: name in this file -> definition that is imported from this package
    foreign_imports: imported name -> import statement, for imports from other packages
    globals: all uses of global names in the file; annotations count too, except annotations on local variables
    """

    module: str
    lines: list[str]
    definitions: dict[str, ast.stmt]
    own_imports: dict[str, DefinedName]
    foreign_imports: dict[str, str]
    globals: list[Use]

    @staticmethod
    @cache
    def of(module: str) -> SourceFile:
        """Parse one of the package's modules, such as `ops.scan`; the result is cached."""
        path = PACKAGE / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        tree = ast.parse(text)
        # "from __future__ import annotations" is removed, because it turns annotations into strings. Without it, the
        # bytecode also has the names in annotations, except annotations on local variables, which are never evaluated.
        statements = [
            statement
            for statement in tree.body
            if not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
        ]
        code = compile(ast.Module(statements, []), str(path), "exec", dont_inherit=True)
        source = SourceFile(module, text.splitlines(), {}, {}, {}, sorted(set(_globals(code))))
        for node in tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    source.definitions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    source.definitions[name] = node
                case ast.ImportFrom(module=str(origin)) if origin.startswith(HOME):
                    imported = {a.asname or a.name: DefinedName(origin.removeprefix(HOME), a.name) for a in node.names}
                    source.own_imports.update(imported)
                case ast.Import() | ast.ImportFrom():
                    source.foreign_imports.update({a.asname or a.name: _statement(node, a) for a in node.names})
        return source

    def lines_of(self, name: str) -> range:
        """Return a definition's line numbers, decorators included."""
        node = self.definitions[name]
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        return range(first, (node.end_lineno or first) + 1)

    def uses(self, name: str) -> list[Use]:
        """List the uses of global names within a definition."""
        lines = self.lines_of(name)
        return [use for use in self.globals if use.line in lines]

    def call(self, name: str, function: str) -> ast.Call | None:
        """Return the call in the definition `NAME = function(...)`, or None if the definition has another form."""
        match self.definitions.get(name):
            case ast.Assign(value=ast.Call(func=ast.Name(id=called)) as call) if called == function:
                return call
        return None


def is_module(module: str) -> bool:
    """Return True if the package has a file or folder with this dotted path."""
    path = PACKAGE / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _statement(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if alias.asname:
        name = f"{alias.name} as {alias.asname}"
    else:
        name = alias.name
    if isinstance(node, ast.ImportFrom):
        return f"from {node.module} import {name}"
    return f"import {name}"


def _globals(code: CodeType) -> Iterator[Use]:
    """Yield each use of a global name in a code object, and in the functions and classes nested in it.

    Builtins are skipped. If the code object is a class body, names that the class body assigns are skipped too.
    """
    instructions = list(dis.get_instructions(code))
    fields = {
        instruction.argval
        for instruction in instructions
        if instruction.opname == "STORE_NAME" and code.co_name != "<module>"
    }
    skipped_names = {*dir(builtins), "__annotations__", *fields}
    for instruction in instructions:
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval not in skipped_names:
            position: Any = instruction.positions
            yield Use(instruction.argval, position.lineno, position.col_offset, position.end_col_offset)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
