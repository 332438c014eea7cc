"""What pyproject.toml asks for, and programs that are started where some of it is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron import requirements
from hybridtron.cli import bench
from hybridtron.requirements import is_there, missing

ROOT = Path(__file__).parents[1]
WITHOUT = """
import runpy, sys
absent, sys.argv = set(sys.argv[1].split(",")), sys.argv[2:]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started_without(absent: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A program that finds everything but some modules."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("absent", "command", "cure"),
    [
        ("streaming", ["train.py", "run.max_steps=1"], "mosaicml-streaming=="),
        ("hydra", ["train.py", "run.max_steps=1"], "pip install"),
        ("matplotlib", ["tools/plot_metrics.py", "."], "[plot]"),
        ("transformers", ["tools/convert.py", "export", "--checkpoint", "a", "--output", "b"], "[export]"),
    ],
)
def test_a_program_says_on_one_line_what_it_lacks(absent: str, command: list[str], cure: str) -> None:
    done = started_without(absent, *command)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert cure in line


def test_a_benchmark_says_so_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.mixer", raising=False)
    assert bench.main(["mixer", "--quick"]) == 2
    assert "[export]" in capsys.readouterr().err


def test_help_needs_no_extra() -> None:
    done = started_without("matplotlib", "tools/plot_metrics.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_here_all_is_there() -> None:
    assert missing("prepare", "plot", "export") is None


def test_what_is_missing_and_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"numpy", "pyarrow", "mosaicml-streaming"}
    monkeypatch.setattr(requirements, "is_there", lambda name: name not in absent)
    assert missing("prepare") == (
        'numpy, pyarrow, mosaicml-streaming are not installed: pip install --editable ".[prepare]" && '
        'pip install --no-deps "mosaicml-streaming==0.13.0"'
    )


def test_a_package_below_one_that_is_absent() -> None:
    assert not is_there("no-such-package")
    assert is_there("megatron-core")


def test_an_extra_of_extras_is_read_by_its_own_packages() -> None:
    extras = requirements.requirements().extras
    assert "pytest" in extras["dev"]
    assert not any("hybridtron" in names for names in extras.values())
