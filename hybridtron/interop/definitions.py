"""Top-level definitions of the package's files, and the global names that each uses: what `shipped` puts together."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

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

    @staticmethod
    @cache
    def of(module: str) -> SourceFile:
        path = PACKAGE / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        found = SourceFile(module, text.splitlines(), {}, {}, {})
        for node in ast.parse(text).body:
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

    def uses(self, name: str) -> Iterator[Use]:
        """The global names that a definition uses."""
        for used in _globals(self.definitions[name], frozenset()):
            if not hasattr(builtins, used.id):
                assert used.end_col_offset is not None
                yield Use(used.id, used.lineno, used.col_offset, used.end_col_offset)

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


def _globals(node: ast.AST, bound: frozenset[str]) -> Iterator[ast.Name]:
    """Names that are looked up in the module: neither arguments, nor assigned in a function around them."""
    match node:
        case ast.Name():
            if node.id not in bound:
                yield node
        case ast.FunctionDef() | ast.Lambda():
            arguments = node.args
            outside = [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
            outside += [a.annotation for a in _arguments(arguments) if a.annotation is not None]
            if isinstance(node, ast.FunctionDef):
                outside += [*node.decorator_list, *([node.returns] if node.returns is not None else [])]
            for part in outside:
                yield from _globals(part, bound)
            inside = bound | {a.arg for a in _arguments(arguments)} | set(_stored(node))
            for part in node.body if isinstance(node, ast.FunctionDef) else [node.body]:
                yield from _globals(part, inside)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            inside = bound | {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            for part in ast.iter_child_nodes(node):
                yield from _globals(part, inside)
        case ast.comprehension():
            for part in (node.target, node.iter, *node.ifs):
                yield from _globals(part, bound)
        case ast.ClassDef():
            fields = bound | set(_stored(node))  # of the class body; its methods do not see them
            for part in [*node.bases, *node.decorator_list, *(k.value for k in node.keywords)]:
                yield from _globals(part, bound)
            for part in node.body:
                yield from _globals(part, bound if isinstance(part, ast.FunctionDef) else fields)
        case _:
            for part in ast.iter_child_nodes(node):
                yield from _globals(part, bound)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    single = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *single]


def _stored(scope: ast.AST) -> Iterator[str]:
    """Names that are assigned in a function or class, not in those inside of it."""
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.Name(ctx=ast.Store(), id=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Lambda():
                pass
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():  # has targets of its own
                yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
                yield from _stored(node)
            case _:
                yield from _stored(node)
