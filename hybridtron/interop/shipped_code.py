"""The files of the class that is shipped with a model: those in `hybridtron/hf`, and one that is made here.

`mixers_hybridtron.py` holds every mixer of the registry: its spec, its module and the ops that it computes with, in the
words of the package. It is put together definition by definition: what a mixer uses, and what that uses, as each stands
in its file. So a mixer is written once, and is shipped without another line.

Three things differ from the package. Instead of `parallel/linear` stands `linear_hybridtron.py`, which knows a single
process. An op becomes a plain function, its reference or what IMPLEMENTATIONS says: what chooses among them looks for
packages and devices, of which the folder knows nothing. A name that two files define gets its file's name behind it.
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
    "ops.total": "context_hybridtron",
}
IMPLEMENTATIONS = {
    **dict.fromkeys(("selective_scan", "ssd_scan", "decay_scan", "gla_scan", "delta_scan"), "chunked"),
    **dict.fromkeys(("angles", "attention"), "blocked"),
    "sparse_attention": "tiled",
}
"""Of ops whose reference, token by token or with a mask over all pairs, is too slow to be shipped alone."""
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
"""What the written files use of it."""
FOREIGN = {"torch", *sys.stdlib_module_names}
VERSION = 2
RELEASED = {"0.1.0": "893afca9a78c4ace42de9a048856fa4aa96e782037ae94a5caefb4ed08561fc4"}
"""Digests of what earlier versions shipped. A folder with one of them is run as it stands, like one of this version."""
HEAD = f'''"""Every mixer with what it computes with, on torch alone: specs, modules and ops.

Made from the sources of hybridtron, definition by definition, when a model was exported. Version {VERSION} of the
shipped code.
"""

from __future__ import annotations
'''


class NotShippable(ValueError):
    """A mixer uses what can't be shipped; the message says what, and where."""


@cache
def shipped_code() -> dict[str, bytes]:
    """The files that an exported folder brings, by name. Raises NotShippable."""
    return {path.name: path.read_bytes() for path in WRITTEN} | {f"{GENERATED}.py": mixers_file().encode()}


def digest_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return digest.hexdigest()


def is_shipped(files: Mapping[str, bytes]) -> bool:
    """Whether these are the files of this version or of an earlier one, byte for byte."""
    return digest_of(files) in {digest_of(shipped_code()), *RELEASED.values()}


def provide(package: str) -> None:
    """Let the generated file be imported from a package, as if it lay there."""
    name, text = f"{package}.{GENERATED}", mixers_file()
    sys.modules[name] = module = module_from_spec(ModuleSpec(name, None))
    file = f"<{name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where tracebacks find it
    exec(compile(text, file, "exec"), module.__dict__)


@cache
def mixers_file() -> str:
    """The text of the generated file. Raises NotShippable."""
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
    file, _, name = named.partition(":")
    return DefinedName(file.removeprefix(HOME), name)


def _resolved(module: str, name: str) -> DefinedName | None:
    """Where a name of a file is defined; None where that is not in what is put together."""
    source = SourceFile.of(module)
    if name in source.own_imports:
        place = source.own_imports[name]
        in_itself = place == (module, name)  # `from hybridtron.ops import scan`, a file
        return None if in_itself or place.module in STAND_INS else _resolved(*place)
    if (op := source.call(name, "Op")) is not None:
        return _implementation(module, name, op)
    return DefinedName(module, name) if name in source.definitions else None


def _implementation(module: str, name: str, op: ast.Call) -> DefinedName | None:
    """The function that an op becomes: `name = Op(file.function, (file.IMPLEMENTATION, ...))`."""
    reference, *others = [node for node in ast.walk(op) if isinstance(node, ast.Attribute)]
    if name not in IMPLEMENTATIONS:
        return _resolved(f"{module}.{ast.unparse(reference.value)}", reference.attr)
    for each in others:
        file = f"{module}.{ast.unparse(each.value)}"
        made = SourceFile.of(file).call(each.attr, "Implementation")
        if made is not None and ast.literal_eval(made.args[0]) == IMPLEMENTATIONS[name]:
            return _resolved(file, ast.unparse(made.args[1]))
    raise NotShippable(f"{name} has no implementation {IMPLEMENTATIONS[name]}")


def _closure(wanted: Iterable[DefinedName]) -> list[DefinedName]:
    """What is wanted and all that it uses, file by file, each file behind those that it imports."""
    found: set[DefinedName] = set()
    waiting = [place for each in wanted if (place := _resolved(*each)) is not None]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        found.add(place)
        for use in SourceFile.of(place.module).uses(place.name):
            if (used := _resolved(place.module, use.name)) is not None:
                waiting.append(used)
            else:
                _check_foreign(place, use)
    order: list[str] = []
    entered: set[str] = set()
    for module in sorted({place.module for place in found}):
        _after_imports(module, order, entered)
    return [DefinedName(m, n) for m in order for n in SourceFile.of(m).definitions if (m, n) in found]


def _after_imports(module: str, order: list[str], entered: set[str]) -> None:
    if module in entered or module in STAND_INS:
        return
    entered.add(module)
    for place in SourceFile.of(module).own_imports.values():
        inside = f"{place.module}.{place.name}"
        _after_imports(inside if is_module(inside) else place.module, order, entered)
    order.append(module)


def _check_foreign(place: DefinedName, use: Use) -> None:
    source, where = SourceFile.of(place.module), f"hybridtron/{place.module.replace('.', '/')}.py: {place.name}"
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
    """What each is called in the file: by its own name, which an op's implementation takes from the op."""
    folders = {place.module.rpartition(".")[0] for place in places if place.module.count(".") > 1}
    chosen = {_resolved(folder, op): op for folder in folders for op in IMPLEMENTATIONS}
    wanted = {place: chosen.get(place, place.name) for place in places}
    references = [place for place in places if place.name in IMPLEMENTATIONS]
    wanted |= {place: f"{place.name}_reference" for place in references}
    taken = Counter([*wanted.values(), *_imported(places)])
    return {p: f"{name}_of_{p.module.replace('.', '_')}" if taken[name] > 1 else name for p, name in wanted.items()}


def _imported(places: list[DefinedName]) -> dict[str, str]:
    """The names that the file imports, each with its statement."""
    found: dict[str, str] = {}
    for module, name in places:
        source = SourceFile.of(module)
        for use in source.uses(name):
            if (own := source.own_imports.get(use.name)) is not None and own.module in STAND_INS:
                found[use.name] = f"from .{STAND_INS[own.module]} import {own.name}"
            elif use.name in source.foreign_imports:
                found[use.name] = source.foreign_imports[use.name]
    return found


def _imports(places: list[DefinedName]) -> list[str]:
    """Import statements, one for each module."""
    together: dict[str, list[str]] = {}
    for statement in sorted(set(_imported(places).values())):
        module, _, name = statement.partition(" import ")
        together.setdefault(module, []).extend([name] * bool(name))
    return [f"{module} import {', '.join(names)}" if names else module for module, names in together.items()]


def _text(place: DefinedName, names: dict[DefinedName, str]) -> str:
    """A definition as it stands in its file, with the names that it and others have here."""
    source = SourceFile.of(place.module)
    lines, own = list(source.lines), source.lines_of(place.name)
    for use in sorted(source.uses(place.name), key=lambda use: (use.line, use.start), reverse=True):
        if (used := _resolved(place.module, use.name)) is not None:
            line = lines[use.line - 1].encode()  # ast counts columns in bytes
            lines[use.line - 1] = (line[: use.start] + names[used].encode() + line[use.end :]).decode()
    at = source.definitions[place.name].lineno - 1
    lines[at] = re.sub(rf"^(def |class |){place.name}\b", rf"\g<1>{names[place]}", lines[at])
    return "\n".join(lines[own.start - 1 : own.stop - 1]) + "\n"
