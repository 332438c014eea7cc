"""Where no guard can be built, a rehearsal says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("CXX", None)
    words = [sys.executable, "-m", "hybridtron", "rehearse", "recipe=laptop"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line and "arn" not in line]
    assert line == "nothing can be rehearsed here: no C++ compiler (c++, g++, clang++; CXX=...)"
