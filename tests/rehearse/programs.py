"""Programs that rehearse: each needs a process of its own, since torch must not have been imported before."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


PATIENT = pytest.mark.timeout(3600)
"""For tests and fixtures that wait for such a program: its limit is of processor time, as other programs take turns."""


def printed_by(name: str, *arguments: str, processor_s: int) -> Any:
    """Return the JSON that `tests.rehearse.NAME` prints. Its process is killed after that much processor time."""
    command = [sys.executable, "-m", f"tests.rehearse.{name}", *arguments]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout)
