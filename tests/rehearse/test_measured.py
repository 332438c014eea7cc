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
WITHIN = 0.1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_with_what_launches_took_besides_the_model_is_near_what_was_measured(path: Path) -> None:
    card = json.loads(path.read_text())
    settings = card["command"].partition(", with ")[2].split()
    command = [*REHEARSE, "--json", f"recipe={path.stem}", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=190)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = json.loads(done.stdout)
    model = report["model"]
    assert model["expected_tokens_per_second"] == pytest.approx(card["tokens_per_second"], rel=WITHIN)
    assert model["tokens_per_second"] > card["tokens_per_second"]  # or nothing is missing in it
    assert report["memory"]["planned"] == pytest.approx(1e9 * card["peak_gb"], rel=WITHIN / 5)
