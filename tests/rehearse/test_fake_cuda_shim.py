"""The shim is loaded as it was written, or made again; where none can be built, a rehearsal says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.compiled import compiler, run_compiler
from hybridtron.rehearse import fake_cuda_shim

ROOT = Path(__file__).parents[2]
DAMAGED = """
import ctypes, shutil, time
from pathlib import Path
from hybridtron.rehearse import fake_cuda_shim
from tests.damage import put, truncations, zeroed_pages

targets = []
torch_folder = fake_cuda_shim._torch_folder()

def compiled(_, target):
    targets.append(target)
    shutil.copy({answer!r}, target)

fake_cuda_shim._compile = compiled
assert fake_cuda_shim.describe() == (True, "built by the first rehearsal")
fake_cuda_shim.load()
path = Path({cache!r}, "hybridtron", "rehearse", fake_cuda_shim._name(torch_folder))
whole = path.read_bytes()
damages = [b"", *truncations(whole, 20, time.time_ns()), *zeroed_pages(whole, 20, time.time_ns())]
for number, damaged in enumerate(damages, 2):
    put(path, damaged)
    fake_cuda_shim.load.cache_clear()
    good, said = fake_cuda_shim.describe()
    assert good and said.startswith(f"built again by the next rehearsal: {{path}} had"), said
    assert fake_cuda_shim.load().answer() == 42
    assert len(targets) == number
    assert path.read_bytes() == whole
assert fake_cuda_shim.describe() == (True, "built for this torch")
print("all made again")
"""


def test_damaged_shim_is_compiled_again(tmp_path: Path) -> None:
    """Load damaged shims in a process without torch, which would end by SIGBUS."""
    source = tmp_path / "answer.cpp"
    answer = tmp_path / "answer.so"
    source.write_text('extern "C" int answer() { return 42; }\n')
    run_compiler(compiler(), ["-shared", "-fPIC", str(source)], answer)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    program = DAMAGED.format(answer=str(answer), cache=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all made again\n"), done.stdout + done.stderr


def test_shim_in_an_untrusted_cache_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o777)
    good, said = fake_cuda_shim.describe()
    assert not good
    assert said.startswith(f"{tmp_path} can be changed by every user: chmod go-w {tmp_path}")


def test_rehearsal_without_a_compiler_exits_with_1_and_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("CXX", None)
    words = [sys.executable, "-m", "hybridtron", "rehearse", "recipe=laptop"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line and "arn" not in line]
    assert (
        line == "this machine cannot rehearse: no C++ compiler (c++, g++, clang++) on the PATH: install one, or set CXX"
    )
