"""Write the ops of the Hugging Face class, `hybridtron/hf/ops_hybridtron.py`, from those of the package.

    make hf-ops

The class is shipped with a model and knows nothing of hybridtron. What it computes with is taken here, function by
function, from `hybridtron/ops`: the functions named below and all that they use, in their own words. Left out are the
choice among several forms of an op, so that the form named is the one that runs, and forms for packages. A name that
two files have gets its file's name behind it. A test fails when the file is not what this would write.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "hybridtron/ops"
TARGET = ROOT / "hybridtron/hf/ops_hybridtron.py"
Place = tuple[str, str]
"""A file of `ops` without its ending, and a name in it."""

WANTED: dict[Place, str] = {
    ("norm.reference", "rms_norm"): "rms_norm",
    ("norm.reference", "rope_table"): "rope_table",
    ("norm.reference", "apply_rope"): "apply_rope",
    ("swiglu.reference", "swiglu"): "swiglu",
    ("conv.reference", "causal_conv"): "causal_conv",
    ("scan.reference", "chunked"): "chunked_selective_scan",
    ("ssd.reference", "chunked"): "chunked_ssd_scan",
    ("gated_norm.reference", "gated_squares"): "gated_squares",
    ("gated_norm.reference", "gated_scale"): "gated_scale",
    ("attention.reference", "remember"): "remember",
    ("attention.reference", "attention"): "attention",
    ("attention.reference", "_blocked"): "blocked_attention",
    ("span.reference", "span_attention"): "span_attention",
    ("span.past", "choose_by_relevance"): "choose_by_relevance",
    ("span.past", "choose_at_random"): "choose_at_random",
}
HEAD = '''"""What the layers of `modeling_hybridtron.py` compute with, on torch alone.

Generated from hybridtron/ops by tools/make_hf_ops.py: change it there, and run `make hf-ops`.
"""

from __future__ import annotations
'''
HOME = "hybridtron.ops."
TITLES = {
    "norm.reference": "norm_rope",
    "swiglu.reference": "swiglu",
    "conv.reference": "conv1d",
    "scan.reference": "scan",
    "ssd.reference": "ssd",
    "gated_norm.reference": "gated_norm",
    "attention.reference": "attention",
    "span.reference": "span",
    "span.past": "span_past",
    "span.choice": "span_choice",
    "scan.recurrence": "recurrence",
    "ssd.decay": "decay",
}
"""What the files are called in the text."""


@dataclass(frozen=True)
class Source:
    """A file of `ops`: its text, its definitions by name, the files of what it imports from there, and its imports."""

    lines: list[str]
    title: str
    definitions: dict[str, ast.stmt]
    elsewhere: dict[str, str]
    imports: dict[str, str]

    @staticmethod
    @cache
    def of(module: str) -> Source:
        text = (OPS / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        definitions: dict[str, ast.stmt] = {}
        elsewhere: dict[str, str] = {}
        imports: dict[str, str] = {}
        for node in tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name != "_":
                    definitions[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]):
                    definitions[name] = node
                case ast.ImportFrom(module=str(origin)) if origin.startswith(HOME):
                    elsewhere |= {alias.name: origin.removeprefix(HOME) for alias in node.names}
                case ast.Import() | ast.ImportFrom():
                    imports |= {alias.asname or alias.name: _import_of(node, alias) for alias in node.names}
        title = (ast.get_docstring(tree) or "").partition("\n")[0]
        return Source(text.splitlines(), title, definitions, elsewhere, imports)

    def names(self, name: str) -> Iterator[ast.Name]:
        """Every use of a name in a definition, but in the decorators that are left out."""
        node = self.definitions[name]
        dropped = {id(part) for each in _decorators(node) if _chooses(each) for part in ast.walk(each)}
        yield from (part for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in dropped)


def generated() -> str:
    """The whole file."""
    places = _needed()
    names = _names(places)
    imports = sorted({Source.of(m).imports[n.id] for m, d in places for n in Source.of(m).names(d) if _imported(m, n)})
    parts = [HEAD, *imports]
    told = None
    for module, name in places:
        if module != told:
            parts.append(f"\n# ---- {TITLES[module]}\n# {Source.of(module).title}\n")
            told = module
        parts.append(_text(module, name, names))
    command = [sys.executable, "-m", "ruff"]
    text = "\n".join(parts) + "\n"
    for step in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        arguments = [*command, *step, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _needed() -> list[Place]:
    """What is wanted and all that it uses, file by file and in the files' own order; no file before those it uses."""
    found: set[Place] = set()
    order: list[str] = []

    def visit(module: str, name: str) -> None:
        source = Source.of(module)
        if name in source.elsewhere:
            visit(source.elsewhere[name], name)
        elif name in source.definitions and (module, name) not in found:
            found.add((module, name))
            for used in source.names(name):
                visit(module, used.id)
            if module not in order:
                order.append(module)

    for place in WANTED:
        visit(*place)
    return [(module, name) for module in order for name in Source.of(module).definitions if (module, name) in found]


def _names(places: list[Place]) -> dict[Place, str]:
    """What each is called in the file."""
    common = Counter(WANTED.get(place, place[1]) for place in places)
    return {
        (module, name): WANTED.get((module, name)) or (f"{name}_of_{TITLES[module]}" if common[name] > 1 else name)
        for module, name in places
    }


def _text(module: str, name: str, names: dict[Place, str]) -> str:
    """A definition as it stands in its file, with the names that it and others have here."""
    source = Source.of(module)
    node = source.definitions[name]
    assert node.end_lineno is not None
    edits: list[tuple[int, int, int, str]] = []
    for used in source.names(name):
        new = names.get((source.elsewhere.get(used.id, module), used.id))
        if new is not None and new != used.id:
            edits.append((used.lineno, used.col_offset, used.col_offset + len(used.id), new))
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Attribute(value=ast.Name() as inner, attr="reference"), attr="function"):
                edits.append((part.lineno, inner.col_offset + len(inner.id), part.end_col_offset or 0, ""))
    lines = list(source.lines)
    for line, start, end, new in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + new + lines[line - 1][end:]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        word = "def" if isinstance(node, ast.FunctionDef) else "class"
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"{word} {name}", f"{word} {names[module, name]}", 1)
    kept = [each for each in _decorators(node) if not _chooses(each)]
    first = [line for each in kept for line in lines[each.lineno - 1 : each.end_lineno]]
    body = lines[node.lineno - 1 : node.end_lineno]
    return "\n".join([*first, *body]) + "\n"


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _chooses(decorator: ast.expr) -> bool:
    """Whether it makes a function one of an op's forms."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) == "op" or ast.unparse(called).endswith(".form")


def _imported(module: str, used: ast.Name) -> bool:
    return used.id in Source.of(module).imports


def _import_of(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
    return f"from {node.module} import {name}" if isinstance(node, ast.ImportFrom) else f"import {name}"


def main() -> None:
    argparse.ArgumentParser(description=f"Write {TARGET.relative_to(ROOT)} from the package's ops.").parse_args()
    TARGET.write_text(generated(), encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
