"""The code files that are shipped with an exported model: those in `hybridtron/hf`, and a generated one.

The generated file, `mixers_hybridtron.py`, has every registered mixer: its spec, its module and the ops that it uses.
It consists of the package's own definitions, copied verbatim along with all definitions that they use, so that a mixer
is written once and needs no second version for exports.

The copies differ from the package in three ways. `linear_hybridtron.py` and `context_hybridtron.py`, for a single
process, replace the modules in STAND_INS. An op becomes a plain function, its reference or the implementation in
IMPLEMENTATIONS, because the dispatcher depends on optional packages and devices. A name that several files define gets
the file's name as a suffix.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from hybridtron.architecture import SPECS
from hybridtron.interop.definitions import HOME, PACKAGE, DefinedName, SourceFile, Use, is_module

WRITTEN = tuple(sorted((PACKAGE / "hf").glob("*_hybridtron.py")))
GENERATED = "mixers_hybridtron"
STAND_INS = {
    "parallel.linear": "linear_hybridtron",
    "parallel.context": "context_hybridtron",
    "ops.transition": "context_hybridtron",
}
IMPLEMENTATIONS = {
    **dict.fromkeys(("selective_scan", "ssd_scan", "decay_scan", "gla_scan", "delta_scan"), "chunked"),
    **dict.fromkeys(("angles", "attention"), "blocked"),
    "sparse_attention": "tiled",
}
"""Implementations of ops whose reference is too slow to ship: it works token by token, or on a mask over all pairs."""
NEEDED_BESIDE = (
    DefinedName("architecture.base", "ModelSizes"),
    DefinedName("data.batch", "SeqInfo"),
    DefinedName("mixers.base", "State"),
    DefinedName("model.init", "starting_value"),
    DefinedName("mixers.norm", "RMSNorm"),
    DefinedName("ops.multiplied", "multiplied"),
    DefinedName("ops.attention", "attention"),
    DefinedName("ops.attention.reference", "attention"),  # attn_implementation=eager
    DefinedName("ops.documents", "document_starts"),
    DefinedName("ops.precision", "at_least_fp32"),
)
"""Definitions that the handwritten files import from the generated one, apart from mixers."""
FOREIGN = {"torch", *sys.stdlib_module_names}
VERSION = 2
RELEASED = {
    "0.1.0": "893afca9a78c4ace42de9a048856fa4aa96e782037ae94a5caefb4ed08561fc4",
    "0.1.0.post1": "75c962f75679972ba493922445ee864094baebc226c3005412985990ff71d768",
    "0.1.0.post2": "0d62405fa810b26585e5b0493147b8d93dd007ba5801c2e59c4c7c2c491fe1e3",
}
"""Digests of the code that earlier versions shipped. The code of a folder with such a digest is trusted and run."""
HEAD = f'''"""Every mixer with what it computes with, on torch alone: specs, modules and ops.

Made from the sources of hybridtron, definition by definition, when a model was exported. Version {VERSION} of the
shipped code.
"""

from __future__ import annotations
'''


class NotShippable(ValueError):
    """Raised if a mixer uses something that can't be shipped; the message names both."""


@cache
def shipped_code() -> dict[str, bytes]:
    """Return the code files for an exported folder, by name. Raises NotShippable."""
    return {path.name: path.read_bytes() for path in WRITTEN} | {f"{GENERATED}.py": mixers_file().encode()}


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 digest of files with their names and sizes."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return digest.hexdigest()


def is_shipped(files: Mapping[str, bytes]) -> bool:
    """Check that files are exactly the code shipped by this version or an earlier one."""
    return digest_of(files) in {digest_of(shipped_code()), *RELEASED.values()}


def provide(package: str) -> None:
    """Make the generated file importable as a module in `package`, without writing it to disk."""
    name = f"{package}.{GENERATED}"
    text = mixers_file()
    sys.modules[name] = module = module_from_spec(ModuleSpec(name, None))
    file = f"<{name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # so that tracebacks show its lines
    exec(compile(text, file, "exec"), module.__dict__)


@cache
def mixers_file() -> str:
    """Return the generated file's text. Raises NotShippable."""
    mixers = {kind: (_place_of(spec), _place_of_module(spec.module)) for kind, spec in SPECS.items()}
    places = _closure([*(place for pair in mixers.values() for place in pair), *NEEDED_BESIDE])
    names = _names(places)
    parts = [HEAD, *_imports(places)]
    module = ""
    for place in places:
        if place.module != module:
            module = place.module
            parts.append(f"\n\n# ---- hybridtron/{module.replace('.', '/')}.py")
        parts.append("\n" + _text(place, names))
    entries = [f'    "{kind}": ({names[spec]}, {names[mixer]}),' for kind, (spec, mixer) in mixers.items()]
    return "\n".join([*parts, "\nMIXERS = {", *entries, "}", ""])


def _place_of(spec: type) -> DefinedName:
    return DefinedName(spec.__module__.removeprefix(HOME), spec.__name__)


def _place_of_module(named: str) -> DefinedName:
    """Parse a spec's `module`, `FILE:CLASS`."""
    file, _, name = named.partition(":")
    return DefinedName(file.removeprefix(HOME), name)


def _resolved(module: str, name: str) -> DefinedName | None:
    """Follow imports to a name's definition; None if the generated file does not contain that definition.

    This is so for names from other packages and from modules with a stand-in.
    """
    source = SourceFile.of(module)
    if name in source.own_imports:
        place = source.own_imports[name]
        is_submodule = place == (module, name)  # `from hybridtron.ops.scan import reference` in that folder: a file
        if is_submodule or place.module in STAND_INS:
            return None
        return _resolved(*place)
    if (op := source.call(name, "Op")) is not None:
        return _implementation(module, name, op)
    if name in source.definitions:
        return DefinedName(module, name)
    return None


def _implementation(module: str, name: str, op: ast.Call) -> DefinedName | None:
    """Return the function that replaces an op, defined by `name = Op(file.reference, (file.IMPLEMENTATION, ...))`."""
    reference, *others = [node for node in ast.walk(op) if isinstance(node, ast.Attribute)]
    if name not in IMPLEMENTATIONS:
        return _resolved(f"{module}.{ast.unparse(reference.value)}", reference.attr)
    for attribute in others:
        file = f"{module}.{ast.unparse(attribute.value)}"
        implementation = SourceFile.of(file).call(attribute.attr, "Implementation")
        if implementation is not None and ast.literal_eval(implementation.args[0]) == IMPLEMENTATIONS[name]:
            return _resolved(file, ast.unparse(implementation.args[1]))
    raise NotShippable(f"{name} has no implementation {IMPLEMENTATIONS[name]}")


def _closure(wanted: Iterable[DefinedName]) -> list[DefinedName]:
    """Return the wanted definitions and their dependencies, file by file, each file after its imports."""
    reached: set[DefinedName] = set()
    waiting = [place for defined_name in wanted if (place := _resolved(*defined_name)) is not None]
    while waiting:
        place = waiting.pop()
        if place in reached:
            continue
        reached.add(place)
        for use in SourceFile.of(place.module).uses(place.name):
            if (definition := _resolved(place.module, use.name)) is not None:
                waiting.append(definition)
            else:
                _check_foreign(place, use)
    order: list[str] = []
    entered: set[str] = set()
    for module in sorted({place.module for place in reached}):
        _after_imports(module, order, entered)
    return [DefinedName(m, n) for m in order for n in SourceFile.of(m).definitions if (m, n) in reached]


def _after_imports(module: str, order: list[str], entered: set[str]) -> None:
    """Append a module to `order` after the modules that it imports (depth-first); `entered` prevents repeats."""
    if module in entered or module in STAND_INS:
        return
    entered.add(module)
    for place in SourceFile.of(module).own_imports.values():
        inside = f"{place.module}.{place.name}"
        _after_imports(inside if is_module(inside) else place.module, order, entered)
    order.append(module)


def _check_foreign(place: DefinedName, use: Use) -> None:
    """Raise NotShippable unless a name comes from a stand-in, from torch or from Python's standard library."""
    source = SourceFile.of(place.module)
    where = f"hybridtron/{place.module.replace('.', '/')}.py: {place.name}"
    if use.name in source.own_imports:
        module, name = source.own_imports[use.name]
        if module in STAND_INS:
            if name not in SourceFile.of(f"hf.{STAND_INS[module]}").definitions:
                raise NotShippable(
                    f"{where} uses {name}, which hybridtron/hf/{STAND_INS[module]}.py has no stand-in for"
                )
            return
        raise NotShippable(f"{where} uses {use.name}, a file of the package: import the names that are used of it")
    statement = source.foreign_imports.get(use.name)
    if statement is None:
        raise NotShippable(f"{where} uses {use.name}, which is neither defined nor imported by a line of its own")
    if (package := statement.split()[1].split(".")[0]) not in FOREIGN:
        raise NotShippable(f"{where} uses {package}; what is shipped with a model uses torch and Python's library only")


def _names(places: list[DefinedName]) -> dict[DefinedName, str]:
    """Choose each definition's name in the generated file.

    It keeps its own name, but an op's implementation gets the op's name, and the op's reference the suffix
    `_reference`. Names that would occur twice get their file's path as a suffix.
    """
    folders = {place.module.rpartition(".")[0] for place in places if place.module.count(".") > 1}
    op_names = {_resolved(folder, op): op for folder in folders for op in IMPLEMENTATIONS}
    wanted = {place: op_names.get(place, place.name) for place in places}
    references = [place for place in places if place.name in IMPLEMENTATIONS]
    wanted |= {place: f"{place.name}_reference" for place in references}
    counts = Counter([*wanted.values(), *_imported(places)])
    return {p: f"{name}_of_{p.module.replace('.', '_')}" if counts[name] > 1 else name for p, name in wanted.items()}


def _imported(places: list[DefinedName]) -> dict[str, str]:
    """Map each name that the generated file imports to its import statement."""
    statements: dict[str, str] = {}
    for module, name in places:
        source = SourceFile.of(module)
        for use in source.uses(name):
            if (origin := source.own_imports.get(use.name)) is not None and origin.module in STAND_INS:
                statements[use.name] = f"from .{STAND_INS[origin.module]} import {origin.name}"
            elif use.name in source.foreign_imports:
                statements[use.name] = source.foreign_imports[use.name]
    return statements


def _imports(places: list[DefinedName]) -> list[str]:
    """Return the generated file's import statements, one for each module."""
    names_by_module: dict[str, list[str]] = {}
    for statement in sorted(set(_imported(places).values())):
        module, _, name = statement.partition(" import ")
        names_by_module.setdefault(module, []).extend([name] * bool(name))
    return [f"{module} import {', '.join(names)}" if names else module for module, names in names_by_module.items()]


def _text(place: DefinedName, names: dict[DefinedName, str]) -> str:
    """Return a definition's source text, with its own and other definitions' names replaced by those in `names`."""
    source = SourceFile.of(place.module)
    lines = list(source.lines)
    line_numbers = source.lines_of(place.name)
    for use in sorted(source.uses(place.name), key=lambda use: (use.line, use.start), reverse=True):
        if (definition := _resolved(place.module, use.name)) is not None:
            line = lines[use.line - 1].encode()  # ast counts columns in bytes
            lines[use.line - 1] = (line[: use.start] + names[definition].encode() + line[use.end :]).decode()
    first_line = source.definitions[place.name].lineno - 1
    lines[first_line] = re.sub(rf"^(def |class |){place.name}\b", rf"\g<1>{names[place]}", lines[first_line])
    return "\n".join(lines[line_numbers.start - 1 : line_numbers.stop - 1]) + "\n"
