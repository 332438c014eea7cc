"""Installation: `make` finds an interpreter, and the requirements in pyproject.toml can be installed together.

They are resolved for every Python that pyproject.toml names, from the plain public index; nothing is downloaded. For
other Pythons than this one pip takes only wheels, so source packages are built first. If the index can't be reached,
nothing is proved, and the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron.requirements import COMPILED

ROOT = Path(__file__).parents[1]
PLAIN = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONSTRAINT": ""}
COME_AS_SOURCE = ("antlr4-python3-runtime==4.9.3", "rouge-score", "sqlitedict", "word2number")  # plain Python


def pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pip without this machine's own indexes, wheels and constraints; proxies and certificates stay."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=os.environ | PLAIN,
        capture_output=True,
        text=True,
        check=False,
    )


SEPARATE = {*COMPILED, "vllm"}
"""Extras that tests/test_extras.py resolves alone: compiled packages can't be resolved for another Python, and vLLM
takes only a transformers older than that of `export`."""


def wanted() -> list[str]:
    """The dependencies, those of every extra that is not SEPARATE, and the torch that `make` installs."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = declared["project"]
    extras = [
        text for name, texts in project["optional-dependencies"].items() if name not in SEPARATE for text in texts
    ]
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    all_of_them = [torch[1], *project["dependencies"], *extras]
    return [text for text in all_of_them if not text.startswith(project["name"])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheels of the packages that the index has only as source."""
    folder = tmp_path_factory.mktemp("wheels")
    asked = pip(["download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(folder), "pip"])
    if asked.returncode:
        pytest.skip("the public package index can't be reached: that the requirements resolve is not proved")
    done = pip(["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *COME_AS_SOURCE])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("python", "megatron"), [("3.11", "0.16."), ("3.12", "0.19."), ("3.13", "0.19.")])
def test_requirements_resolve_together(python: str, megatron: str, built: Path, tmp_path: Path) -> None:
    for_python = ["--python-version", python, "--only-binary=:all:", "--target", str(tmp_path / "nothing")]
    report = tmp_path / "report.json"
    dry = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report), *for_python]
    done = pip([*dry, "--find-links", str(built), *wanted()])
    assert done.returncode == 0, done.stderr
    installed = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    chosen = {package["name"]: package["version"] for package in installed}
    assert chosen["megatron-core"].startswith(megatron)
    assert "triton" in chosen
    alone = pip([*dry, "--no-deps", "--group", f"{ROOT / 'pyproject.toml'}:without-dependencies"])
    assert alone.returncode == 0, alone.stderr


def make(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run `make` apart from one that runs these tests, with the programs in `path` first."""
    inherited = ("MAKEFLAGS", "MAKELEVEL", "PYTHON", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def program(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_takes_the_first_interpreter_that_runs(tmp_path: Path) -> None:
    program(tmp_path / "python3.11", "echo not of this folder >&2; exit 127")
    program(tmp_path / "python3.12", f'exec {sys.executable} "$@"')
    reported = make("--dry-run", "setup", f"VENV={tmp_path / 'new'}", path=tmp_path).stdout
    assert reported.startswith(f"{sys.executable} -m venv")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_does_not_run_another_interpreter_than_asked(tmp_path: Path) -> None:
    program(tmp_path / "old/bin/python", "echo Python 3.11.0")
    program(tmp_path / "asked", "echo Python 3.12.0")
    venv = f"VENV={tmp_path / 'old'}"
    assert make("same-python", venv, f"PYTHON={tmp_path / 'asked'}", path=tmp_path).returncode == 2
    assert make("same-python", venv, path=tmp_path).returncode == 0
