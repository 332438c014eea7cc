"""The guard is loaded as it was written, or made again; where none can be built, a rehearsal says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.compiled import compiler, run_compiler
from hybridtron.rehearse import guard

ROOT = Path(__file__).parents[2]
DAMAGED = """
import ctypes, shutil, time
from pathlib import Path
from hybridtron.rehearse import guard
from tests.damage import put, truncations, zeroed_pages

targets = []
torch_folder = guard._torch_folder()

def compiled(_, target):
    targets.append(target)
    shutil.copy({answer!r}, target)

guard._compile = compiled
assert guard.described() == (True, "built by the first rehearsal")
guard.load()
path = Path({cache!r}, "hybridtron", "rehearse", guard._name(torch_folder))
whole = path.read_bytes()
damages = [b"", *truncations(whole, 20, time.time_ns()), *zeroed_pages(whole, 20, time.time_ns())]
for number, damaged in enumerate(damages, 2):
    put(path, damaged)
    guard.load.cache_clear()
    good, said = guard.described()
    assert good and said.startswith(f"built again by the next rehearsal: {{path}} had"), said
    assert guard.load().answer() == 42
    assert len(targets) == number
    assert path.read_bytes() == whole
assert guard.described() == (True, "built for this torch")
print("all made again")
"""


def test_a_damaged_guard_is_made_again(tmp_path: Path) -> None:
    """Load damaged guards in a process without torch, which would end by SIGBUS."""
    source = tmp_path / "answer.cpp"
    answer = tmp_path / "answer.so"
    source.write_text('extern "C" int answer() { return 42; }\n')
    run_compiler(compiler(), ["-shared", "-fPIC", str(source)], answer)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    program = DAMAGED.format(answer=str(answer), cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all made again\n"), done.stdout + done.stderr


def test_a_guard_that_can_be_neither_loaded_nor_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o777)
    good, said = guard.described()
    assert not good
    assert said.startswith(f"{tmp_path} can be changed by every user: chmod go-w {tmp_path}")


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("CXX", None)
    words = [sys.executable, "-m", "hybridtron", "rehearse", "recipe=laptop"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line and "arn" not in line]
    assert line == "nothing can be rehearsed here: no C++ compiler (c++, g++, clang++; CXX=...)"
