"""The code that is shipped with a model: the files of `hybridtron/hf`, and what earlier versions shipped instead.

The shipped class knows nothing of hybridtron. In the package its file of ops imports implementations of
`hybridtron/ops`; the shipped file of that name has their text: the definitions that are imported there and all that
they use, in their own words. A name that two files define gets its file's name behind it.

The bytes have a version, which a test holds with their digest. A folder whose files are those of any version, byte for
byte, is trusted: its code can be run (`interop/custom`).
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VERSION = 2
EARLIER: dict[int, dict[str, str]] = {
    1: {  # hybridtron 0.1.0
        "attention_hybridtron.py": "6840cd09fa25b7ee1dcff185f7bafd6527a82a538ee966cda6b27965029c3a0b",
        "configuration_hybridtron.py": "eaac85d2f7741832699eef364a01c6c9ea8bbe5b1b872674bb53b725bc8bd10e",
        "mixers_hybridtron.py": "441133eb1eef5395fbcf3b54d8ce0f7b27b65241fe34ca9d26ae15cde39b2fe3",
        "modeling_hybridtron.py": "6b6200a23b06f5c51f528e1e515afc3efd026e900846fc30c59c893da0ce20df",
        "ops_hybridtron.py": "dccc7f8919da321ecf93e0d5e5fad2689506876716e35410e6ead632b2fd6e6a",
    },
}
"""SHA-256 of the files that released versions shipped."""

PACKAGE = Path(__file__).resolve().parents[1]
OPS_FILE = "ops_hybridtron.py"
HOME = "hybridtron.ops."
HEAD = f'''"""What the layers of `modeling_hybridtron.py` compute with, on torch alone.

Made from hybridtron/ops when the model was exported; version {VERSION} of the shipped code.
"""

from __future__ import annotations

'''
Place = tuple[str, str]
"""A module of `ops` (`scan.chunked`), and a name in it."""


def shipped_code() -> dict[str, bytes]:
    """The files that are written beside a model's weights, by name."""
    files = {path.name: path.read_bytes() for path in sorted((PACKAGE / "hf").glob("*_hybridtron.py"))}
    return files | {OPS_FILE: ops_text(PACKAGE / "ops").encode()}


def foreign_file(files: dict[str, bytes]) -> str | None:
    """The name of a file that is not as we ship it; None where all files are those of one version."""
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    current = {name: hashlib.sha256(content).hexdigest() for name, content in shipped_code().items()}
    if found in (current, *EARLIER.values()):
        return None
    return min(name for name in found.keys() | current.keys() if found.get(name) != current.get(name))


@dataclass(frozen=True)
class OpsModule:
    """A module of `ops`: its text, its definitions by name, the modules that others come from, and its imports."""

    lines: list[str]
    title: str
    definitions: dict[str, ast.stmt]
    elsewhere: dict[str, str]
    imports: dict[str, tuple[str, str]]

    @staticmethod
    @cache
    def of(ops: Path, module: str) -> OpsModule:
        text = (ops / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        definitions: dict[str, ast.stmt] = {}
        elsewhere: dict[str, str] = {}
        imports: dict[str, tuple[str, str]] = {}
        for node in tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    definitions[name] = node
                case ast.ImportFrom(module=str(origin)) if origin.startswith(HOME):
                    elsewhere |= {alias.name: origin.removeprefix(HOME) for alias in node.names}
                case ast.Import() | ast.ImportFrom():
                    origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    imports |= {alias.asname or alias.name: (origin, ast.unparse(alias)) for alias in node.names}
        title = (ast.get_docstring(tree) or "").partition("\n")[0]
        return OpsModule(text.splitlines(), title, definitions, elsewhere, imports)

    def names(self, name: str) -> Iterator[ast.Name]:
        """Every use of a name in a definition."""
        yield from (part for part in ast.walk(self.definitions[name]) if isinstance(part, ast.Name))


def ops_text(ops: Path) -> str:
    """The shipped file of ops, from the folder of the package's."""
    wanted = _wanted()
    places = _needed(ops, wanted)
    common = Counter(wanted.get(place, place[1]) for place in places)
    names: dict[Place, str] = {}
    for module, name in places:
        distinct = f"{name}_of_{module.replace('.', '_')}" if common[name] > 1 else name
        names[module, name] = wanted.get((module, name)) or distinct
    parts = [HEAD, _imports(ops, places)]
    heading = ""
    for module, name in places:
        if module != heading:
            parts.append(f"\n# ---- {module}\n# {OpsModule.of(ops, module).title}\n")
            heading = module
        spaced = not isinstance(OpsModule.of(ops, module).definitions[name], ast.Assign)
        parts.append("\n\n" * spaced + _definition(ops, module, name, names) + "\n")
    return "".join(parts)


def _wanted() -> dict[Place, str]:
    """What the layers use, and what they call it: the imports of their file of ops."""
    tree = ast.parse((PACKAGE / "hf" / OPS_FILE).read_text(encoding="utf-8"))
    return {
        (node.module.removeprefix(HOME), alias.name): alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(HOME)
        for alias in node.names
    }


def _needed(ops: Path, wanted: dict[Place, str]) -> list[Place]:
    """What is wanted and all that it uses, module by module and in the modules' own order, used modules first."""
    found: set[Place] = set()
    order: list[str] = []

    def visit(module: str, name: str) -> None:
        source = OpsModule.of(ops, module)
        if name in source.elsewhere:
            visit(source.elsewhere[name], name)
        elif name in source.definitions and (module, name) not in found:
            found.add((module, name))
            for used in source.names(name):
                visit(module, used.id)
            if module not in order:
                order.append(module)

    for place in wanted:
        visit(*place)
    return [(m, name) for m in order for name in OpsModule.of(ops, m).definitions if (m, name) in found]


def _imports(ops: Path, places: list[Place]) -> str:
    """Those of the standard library, then the others; of each `import` comes before `from`."""
    found: dict[str, set[str]] = {}
    for module, name in places:
        source = OpsModule.of(ops, module)
        for used in source.names(name):
            if used.id in source.imports:
                origin, imported = source.imports[used.id]
                found.setdefault(origin, set()).add(imported)
    plain = [f"import {name}" for name in sorted(found.pop("", set()))]
    lines = [*plain, *(f"{origin}import {', '.join(sorted(found[origin]))}" for origin in sorted(found))]
    standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    return "\n".join("".join(f"{line}\n" for line in section) for section in (standard, others) if section)


def _definition(ops: Path, module: str, name: str, names: dict[Place, str]) -> str:
    """A definition as it is written in its module, with the names that it and others have in the shipped file."""
    source = OpsModule.of(ops, module)
    node = source.definitions[name]
    lines = list(source.lines)
    edits: list[tuple[int, int, str, str]] = []
    for used in source.names(name):
        new = names.get((source.elsewhere.get(used.id, module), used.id))
        if new is not None and new != used.id:
            edits.append((used.lineno, used.col_offset, used.id, new))
    for line, start, old, new in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + new + lines[line - 1][start + len(old) :]
    first = node.lineno
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        word = "def" if isinstance(node, ast.FunctionDef) else "class"
        lines[first - 1] = lines[first - 1].replace(f"{word} {name}", f"{word} {names[module, name]}", 1)
        first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(lines[first - 1 : node.end_lineno])
