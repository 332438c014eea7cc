"""Programs that rehearse: each needs a process of its own, since torch must not have been imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def printed_by(name: str, *arguments: str, timeout_s: float) -> Any:
    """The JSON that `tests.rehearse.NAME` prints."""
    command = [sys.executable, "-m", f"tests.rehearse.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
