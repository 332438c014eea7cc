"""The rehearsal's model of time against steps that were measured on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearse.programs import ROOT

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
MEASURED = sorted((ROOT / "benchmarks/cards/measured").glob("*.json"))
REHEARSE = [sys.executable, "-m", "hybridtron", "rehearse", "--gpu", "h200", "--gpus", "1", "--without-packages"]
WITHIN = 0.02  # planned memory
NEAR = (0.9, 1.9)  # modelled speed divided by measured speed: kernels are faster today, and their times lower bounds


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_modelled_steps_are_near_measured_ones(path: Path) -> None:
    card = json.loads(path.read_text())
    settings = card["command"].partition(", with ")[2].split()
    command = [*REHEARSE, "--json", f"recipe={path.stem}", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=190)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = json.loads(done.stdout)
    model = report["model"]
    assert NEAR[0] < model["tokens_per_second"] / card["tokens_per_second"] < NEAR[1]
    assert model["bound"] == "device-bound"
    assert model["step_device_seconds"] > model["step_host_seconds"] > 0
    assert report["memory"]["planned"] == pytest.approx(1e9 * card["peak_gb"], rel=WITHIN)
