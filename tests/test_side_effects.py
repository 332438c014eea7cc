"""Importing the package changes nothing for its importer: filters, handlers, variables, names of modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "hybridtron").rglob("*.py")
)
OF_PROCESSES = ("__main__", "quiet")  # for a process of the package's own alone: its program, its server of workers
IMPORTED = '''
import ast, importlib, json, logging, os, pathlib, signal, sys, warnings

def state():
    """What other parts of a process could notice."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    return {
        "filters": [repr(entry) for entry in warnings.filters],
        "handlers": {log.name: [repr(handler) for handler in log.handlers] for log in loggers if log.handlers},
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "made up": sorted(name for name, module in sys.modules.items() if getattr(module, "__spec__", None) is None),
    }

def foreign(body):
    """The modules of others that a file imports as it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

def brought(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # an optional package, or no module but a name in one
            if (error.name or "").startswith("hybridtron"):
                raise

asked = json.loads(sys.argv[1])
files = [pathlib.Path(asked["root"], *name.split(".")) for name in asked["modules"]]
texts = [(file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text() for file in files]
others = {name for text in texts for name in foreign(ast.parse(text).body)}
brought(sorted(name for name in others if name.split(".")[0] not in ("hybridtron", "__future__")))
before = state()
brought(asked["modules"])
after = state()
changed = [what for what in before if before[what] != after[what]]
print(json.dumps({what: [entry for entry in after[what] if entry not in before[what]] for what in changed}))
'''


@pytest.fixture(scope="module")
def changed() -> dict[str, list[object]]:
    """Return global state that all modules of the package change, after everything they import is imported."""
    asked = json.dumps(
        {"root": str(ROOT), "modules": [name for name in MODULES if name.rpartition(".")[2] not in OF_PROCESSES]}
    )
    command = [sys.executable, "-c", IMPORTED, asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds of imports, and minutes on a busy machine
def test_importing_every_module_changes_no_global_state(changed: dict[str, list[object]]) -> None:
    assert changed == {}


def test_modules_for_worker_processes_are_not_imported() -> None:
    texts = {path: path.read_text() for path in (ROOT / "hybridtron").rglob("*.py")}
    importing = ("parallel import quiet", "parallel.quiet import", "import hybridtron.parallel.quiet")
    assert [path for path, text in texts.items() if any(words in text for words in importing)] == []
