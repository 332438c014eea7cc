"""Every command answers --help at once: it imports neither torch nor packages on top of it, and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron import __version__, requirements
from hybridtron.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOORS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "train.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "slurm").glob("*.py")]
    if '__name__ == "__main__"' in path.read_text()
)
LINES_OF_A_DOOR = 25
HEAVY = ("torch", "megatron.core", "transformers", "matplotlib", "streaming", "pyarrow")
Answer = tuple[int | str | None, int, list[str]]
ALL = '''
import contextlib, importlib.abc, importlib.machinery, io, json, os, runpy, sys

class Refused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the heavy packages, as a program may ask whether they are there, and does not load them."""

    asked = []

    def find_spec(self, name, path, target=None):
        heavy = any(name == package or name.startswith(f"{package}.") for package in HEAVY)
        if heavy:
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module):
        self.asked.append(module.__name__)
        raise ModuleNotFoundError(module.__name__, name=module.__name__)

sys.meta_path.insert(0, Refused())
answers = {}
for asked in json.loads(sys.argv[1]):
    program, *words = asked.split()
    sys.path[0] = os.path.dirname(program)  # as Python itself does
    sys.argv, text, code = [program, *words, "--help"], io.StringIO(), None
    Refused.asked = []
    try:
        with contextlib.redirect_stdout(text):
            (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except ModuleNotFoundError as error:
        code = str(error)
    answers[asked] = code, len(text.getvalue()), Refused.asked
print(json.dumps(answers))
'''


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Run each program with --help; return its exit code, the length of its output, and the heavy packages it imported.

    One interpreter runs all of them, which starts quicker, in a folder where they have nothing to work on.
    """
    folder = tmp_path_factory.mktemp("empty")
    asked = [*(str(ROOT / door) for door in DOORS), *(f"hybridtron {name}" for name in COMMANDS)]
    command = [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{ALL}", json.dumps(asked)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert not list(folder.iterdir())
    return {name.removeprefix(f"{ROOT}/"): answer for name, answer in json.loads(done.stdout).items()}


@pytest.mark.parametrize("program", [*DOORS, *(f"hybridtron {name}" for name in COMMANDS)])
def test_help_is_printed_without_heavy_imports(program: str, answers: dict[str, Answer]):
    code, printed, imported = answers[program]
    assert (code, imported) == (0, [])
    assert printed > 100


@pytest.mark.parametrize("door", DOORS)
def test_tools_only_call_the_command(door: str) -> None:
    assert len((ROOT / door).read_text().splitlines()) <= LINES_OF_A_DOOR


def test_every_command_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, (_, what) in COMMANDS.items():
        assert f"  {name} " in said
        assert what in said
    assert main([]) == 2
    assert capsys.readouterr().err == said


def test_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, nearest in ((["trian"], "train"), (["data", "prepaer"], "prepare"), (["data"], "data verify")):
        assert main(words) == 2
        said = capsys.readouterr()
        assert nearest in said.err
        assert not said.out


def test_former_name_runs_the_command_and_warns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gpu-check", "--help"])
    said = capsys.readouterr()
    assert ended.value.code == 0
    assert said.out.startswith("usage: hybridtron check gpu")
    assert said.err == "warning: `hybridtron gpu-check` has been renamed: use `hybridtron check gpu`\n"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hybridtron {__version__}\n"


def test_missing_package_is_reported_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that works with less reports a missing package once it needs it; training looks first."""
    monkeypatch.setattr(requirements, "missing", lambda *_: "numpy is not installed")
    monkeypatch.setitem(sys.modules, "hybridtron.cli.plot", None)
    for name in ("plot", "train"):
        with pytest.raises(SystemExit) as ended:
            main([name])
        assert ended.value.code == 2
        assert capsys.readouterr().err == "numpy is not installed\n"


def test_threads_sleep_between_operations_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["tasks", "list"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main(["tasks", "list"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
