"""The code files that are shipped with an exported model: the files of `hybridtron/hf`, and a generated file.

The generated file, `mixers_hybridtron.py`, has every registered mixer (attention, Mamba, MLP, ...): its options (spec),
its torch module and the ops that it calls. All definitions are copied from the package, with the definitions that they
use. So no mixer needs a second version for exports.

The copies differ from the package in three ways:

- Modules that communicate between ranks (the keys of STAND_INS) are replaced by handwritten files for a single process:
  `linear_hybridtron.py` and `context_hybridtron.py`.
- An op becomes a plain function: its reference implementation, or the implementation named in IMPLEMENTATIONS. In the
  package, a dispatcher chooses an op's implementation by device and installed packages.
- A name that several files define gets its file's path as a suffix.
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
    "parallel.experts": "linear_hybridtron",
    "ops.transition": "context_hybridtron",
}
IMPLEMENTATIONS = {
    **dict.fromkeys(("selective_scan", "ssd_scan", "decay_scan", "gla_scan", "delta_scan"), "chunked"),
    **dict.fromkeys(("angles", "attention"), "blocked"),
    "sparse_attention": "tiled",
}
"""Op -> implementation to ship. References of these ops are too slow: they loop over tokens, or mask all pairs."""
NEEDED_BESIDE = (
    DefinedName("architecture.base", "ModelSizes"),
    DefinedName("data.batch", "SeqInfo"),
    DefinedName("mixers.base", "State"),
    DefinedName("model.init", "starting_value"),
    DefinedName("mixers.norm", "RMSNorm"),
    DefinedName("ops.multiply", "multiply"),
    DefinedName("ops.attention", "attention"),
    DefinedName("ops.attention.reference", "attention"),  # for attn_implementation=eager
    DefinedName("ops.documents", "document_starts"),
    DefinedName("ops.precision", "at_least_fp32"),
)
"""Definitions, besides mixers, that the handwritten files import from the generated file."""
FOREIGN = {"torch", *sys.stdlib_module_names}
VERSION = 2
RELEASED = {
    "0.1.0": "893afca9a78c4ace42de9a048856fa4aa96e782037ae94a5caefb4ed08561fc4",
    "0.1.0.post1": "75c962f75679972ba493922445ee864094baebc226c3005412985990ff71d768",
    "0.1.0.post2": "0d62405fa810b26585e5b0493147b8d93dd007ba5801c2e59c4c7c2c491fe1e3",
    "0.2.0": "8c5063f4a06755bf31044519d6f2bb46d1d42140d1bc80b13deba64974d8ffbd",
}
"""Version -> digest of the code that it shipped. Code in a folder is trusted and run if it has such a digest."""
HEAD = f'''"""Every mixer with what it computes with, on torch alone: specs, modules and ops.

Made from the sources of hybridtron, definition by definition, when a model was exported. Version {VERSION} of the
shipped code.
"""

from __future__ import annotations
'''


class NotShippable(ValueError):
    """Raised if a definition uses a name that can't be shipped. The message gives the definition and the name."""


@cache
def shipped_code() -> dict[str, bytes]:
    """Return file name -> content for the code files in an exported folder.

    Raises NotShippable if a mixer uses a name that can't be shipped.
    """
    return {path.name: path.read_bytes() for path in WRITTEN} | {f"{GENERATED}.py": mixers_file().encode()}


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 digest over the files' names, sizes and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return digest.hexdigest()


def is_shipped(files: Mapping[str, bytes]) -> bool:
    """Return True if files are exactly the code that this version or an earlier version ships."""
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
    """Return the generated file's text. Raises NotShippable if a mixer uses a name that can't be shipped."""
    mixers = {kind: (_definition_of_spec(spec), _definition_of_module(spec.module)) for kind, spec in SPECS.items()}
    definitions = _closure([*(definition for pair in mixers.values() for definition in pair), *NEEDED_BESIDE])
    names = _names(definitions)
    parts = [HEAD, *_imports(definitions)]
    module = ""
    for definition in definitions:
        if definition.module != module:
            module = definition.module
            parts.append(f"\n\n# ---- hybridtron/{module.replace('.', '/')}.py")
        parts.append("\n" + _text(definition, names))
    entries = [f'    "{kind}": ({names[spec]}, {names[mixer]}),' for kind, (spec, mixer) in mixers.items()]
    return "\n".join([*parts, "\nMIXERS = {", *entries, "}", ""])


def _definition_of_spec(spec: type) -> DefinedName:
    return DefinedName(spec.__module__.removeprefix(HOME), spec.__name__)


def _definition_of_module(file_and_class: str) -> DefinedName:
    """Parse the `module` of a spec, which names the mixer's class as `FILE:CLASS`."""
    file, _, name = file_and_class.partition(":")
    return DefinedName(file.removeprefix(HOME), name)


def _resolved(module: str, name: str) -> DefinedName | None:
    """Follow imports to the definition of a name that `module` uses. Return None if it must not be copied.

    Definitions from other packages and from modules in STAND_INS must not be copied.
    """
    source = SourceFile.of(module)
    if name in source.own_imports:
        imported = source.own_imports[name]
        # `from hybridtron.ops.scan import reference` in ops/scan/__init__.py imports a file, not a definition
        is_submodule = imported == (module, name)
        if is_submodule or imported.module in STAND_INS:
            return None
        return _resolved(*imported)
    if (op := source.call(name, "Op")) is not None:
        return _implementation(module, name, op)
    if name in source.definitions:
        return DefinedName(module, name)
    return None


def _implementation(module: str, name: str, op: ast.Call) -> DefinedName | None:
    """Return the function to ship for an op: the implementation named in IMPLEMENTATIONS, or the op's reference.

    The op is defined as `NAME = Op(FILE.reference, (FILE.IMPLEMENTATION, ...))`; `op` is this call.
    """
    reference, *others = [node for node in ast.walk(op) if isinstance(node, ast.Attribute)]
    if name not in IMPLEMENTATIONS:
        return _resolved(_imported_file(module, reference), reference.attr)
    for attribute in others:
        file = _imported_file(module, attribute)
        implementation = SourceFile.of(file).call(attribute.attr, "Implementation")
        if implementation is not None and ast.literal_eval(implementation.args[0]) == IMPLEMENTATIONS[name]:
            return _resolved(file, ast.unparse(implementation.args[1]))
    raise NotShippable(f"the op {name} has no implementation {IMPLEMENTATIONS[name]}, which IMPLEMENTATIONS names")


def _imported_file(module: str, attribute: ast.Attribute) -> str:
    """Return the file, as a module's dotted name, in which `attribute`, such as `reference.scan`, is defined."""
    return ".".join(SourceFile.of(module).own_imports[ast.unparse(attribute.value)])


def _closure(wanted: Iterable[DefinedName]) -> list[DefinedName]:
    """Return the wanted definitions and all definitions that they use, in an order for a single file.

    Definitions of one file are together, and each file comes after the files that it imports.
    """
    reached: set[DefinedName] = set()
    resolved_names = [_resolved(*defined_name) for defined_name in wanted]
    waiting = [definition for definition in resolved_names if definition is not None]
    while waiting:
        user = waiting.pop()
        if user in reached:
            continue
        reached.add(user)
        for use in SourceFile.of(user.module).uses(user.name):
            if (definition := _resolved(user.module, use.name)) is not None:
                waiting.append(definition)
            else:
                _check_foreign(user, use)
    order: list[str] = []
    entered: set[str] = set()
    for module in sorted({definition.module for definition in reached}):
        _after_imports(module, order, entered)
    return [DefinedName(m, n) for m in order for n in SourceFile.of(m).definitions if (m, n) in reached]


def _after_imports(module: str, order: list[str], entered: set[str]) -> None:
    """Append a module to `order`, after the modules that it imports. `entered` has the modules visited so far."""
    if module in entered or module in STAND_INS:
        return
    entered.add(module)
    for imported in SourceFile.of(module).own_imports.values():
        inside = f"{imported.module}.{imported.name}"
        _after_imports(inside if is_module(inside) else imported.module, order, entered)
    order.append(module)


def _check_foreign(user: DefinedName, use: Use) -> None:
    """Raise NotShippable if a definition (`user`) uses a name that shipped code can't use.

    Shipped code can use stand-ins, torch and Python's standard library.
    """
    source = SourceFile.of(user.module)
    where = f"hybridtron/{user.module.replace('.', '/')}.py: {user.name}"
    if use.name in source.own_imports:
        module, name = source.own_imports[use.name]
        if module in STAND_INS:
            if name not in SourceFile.of(f"hf.{STAND_INS[module]}").definitions:
                raise NotShippable(
                    f"{where} uses {name}: define {name} in the stand-in hybridtron/hf/{STAND_INS[module]}.py"
                )
            return
        raise NotShippable(
            f"{where} uses {use.name}, a module, which can't be shipped: import the needed names from {use.name}"
        )
    statement = source.foreign_imports.get(use.name)
    if statement is None:
        raise NotShippable(f"{where} uses {use.name}: define or import {use.name} at the top level of this file")
    if (package := statement.split()[1].split(".")[0]) not in FOREIGN:
        raise NotShippable(f"{where} uses {package}; shipped code may use only torch and Python's standard library")


def _names(definitions: list[DefinedName]) -> dict[DefinedName, str]:
    """Choose the name of each definition in the generated file.

    Most definitions keep their names. The implementation of an op in IMPLEMENTATIONS gets the op's name, and the op's
    reference gets the suffix `_reference`. If several definitions then have the same name, each of them gets its file's
    path as a suffix.
    """
    folders = {entry.module.rpartition(".")[0] for entry in definitions if entry.module.count(".") > 1}
    op_names = {_resolved(folder, op): op for folder in folders for op in IMPLEMENTATIONS}
    wanted = {entry: op_names.get(entry, entry.name) for entry in definitions}
    references = [entry for entry in definitions if entry.name in IMPLEMENTATIONS]
    wanted |= {entry: f"{entry.name}_reference" for entry in references}
    counts = Counter([*wanted.values(), *_imported(definitions)])
    return {d: f"{name}_of_{d.module.replace('.', '_')}" if counts[name] > 1 else name for d, name in wanted.items()}


def _imported(definitions: list[DefinedName]) -> dict[str, str]:
    """Map each name that the generated file must import to the import statement."""
    statements: dict[str, str] = {}
    for module, name in definitions:
        source = SourceFile.of(module)
        for use in source.uses(name):
            if (origin := source.own_imports.get(use.name)) is not None and origin.module in STAND_INS:
                statements[use.name] = f"from .{STAND_INS[origin.module]} import {origin.name}"
            elif use.name in source.foreign_imports:
                statements[use.name] = source.foreign_imports[use.name]
    return statements


def _imports(definitions: list[DefinedName]) -> list[str]:
    """Return the import statements of the generated file, one for each imported module."""
    names_by_module: dict[str, list[str]] = {}
    for statement in sorted(set(_imported(definitions).values())):
        module, _, name = statement.partition(" import ")
        names_by_module.setdefault(module, []).extend([name] * bool(name))
    return [f"{module} import {', '.join(names)}" if names else module for module, names in names_by_module.items()]


def _text(defined: DefinedName, names: dict[DefinedName, str]) -> str:
    """Return the source text of a definition, with the names of all definitions replaced by the names in `names`."""
    source = SourceFile.of(defined.module)
    lines = list(source.lines)
    line_numbers = source.lines_of(defined.name)
    for use in sorted(source.uses(defined.name), key=lambda use: (use.line, use.start), reverse=True):
        if (definition := _resolved(defined.module, use.name)) is not None:
            line = lines[use.line - 1].encode()  # columns are counted in bytes
            lines[use.line - 1] = (line[: use.start] + names[definition].encode() + line[use.end :]).decode()
    first_line = source.definitions[defined.name].lineno - 1
    lines[first_line] = re.sub(rf"^(def |class |){defined.name}\b", rf"\g<1>{names[defined]}", lines[first_line])
    return "\n".join(lines[line_numbers.start - 1 : line_numbers.stop - 1]) + "\n"
