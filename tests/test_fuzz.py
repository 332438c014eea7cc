"""Three hundred hostile settings and as many hostile command lines end with an exit code, not with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = os.environ.get("HYBRIDTRON_FUZZ_SEED", "0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["keys", "commands"])
def test_hostile_words_end_with_an_exit_code(kind: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--only", kind, "--cases", "300", "--seed", SEED]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr[-2000:]}"
