"""Every program answers --help at once: it imports neither torch nor what builds on it, and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "train.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "slurm").glob("*.py")]
    if '__name__ == "__main__"' in path.read_text()
)
HEAVY = ("torch", "megatron.core", "transformers", "matplotlib", "streaming", "pyarrow")
Answer = tuple[int | str | None, int, list[str]]
ALL = '''
import contextlib, importlib.abc, importlib.machinery, io, json, runpy, sys

class Refused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the heavy packages, as a program may ask whether they are there, and does not load them."""

    asked = []

    def find_spec(self, name, path, target=None):
        heavy = any(name == one or name.startswith(f"{one}.") for one in HEAVY)
        return importlib.machinery.ModuleSpec(name, self) if heavy else None

    def exec_module(self, module):
        self.asked.append(module.__name__)
        raise ModuleNotFoundError(module.__name__, name=module.__name__)

sys.meta_path.insert(0, Refused())
found = {}
for program in sys.argv[1:]:
    sys.argv, text, code = [program, "--help"], io.StringIO(), None
    Refused.asked = []
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except ModuleNotFoundError as error:
        code = str(error)
    found[program] = code, len(text.getvalue()), Refused.asked
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Of each program its exit code, the length of what it printed, and the heavy packages that it asked for.

    One interpreter for all of them, which starts quicker; from a folder where they have nothing to work on.
    """
    folder = tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{ALL}", *(str(ROOT / program) for program in PROGRAMS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert not list(folder.iterdir())
    return {str(Path(program).relative_to(ROOT)): answer for program, answer in json.loads(done.stdout).items()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_printed_without_heavy_imports(program: str, answers: dict[str, Answer]):
    code, printed, imported = answers[program]
    assert (code, imported) == (0, [])
    assert printed > 100
