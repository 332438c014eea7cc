"""Predictions of steps: the committed files, and the command that writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.problems import Unusable
from hybridtron.proving.gpu.queue.parts import RECIPES
from hybridtron.rehearse.predictions import NOTE, main
from tests.rehearse.programs import ROOT

FILES = sorted((ROOT / "benchmarks/predictions").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_predictions_are_dated_and_called_modelled(path: Path) -> None:
    predicted = json.loads(path.read_text())
    assert predicted["about"] == NOTE
    assert predicted["date"] == path.stem
    assert len(predicted["commit"]) == 40
    assert len(predicted["steps"]) >= 3
    for recipe, step in predicted["steps"].items():
        assert f"recipe={recipe}" in step["settings"]
        assert step["step_ms"] == pytest.approx(max(step["device_ms"], step["host_ms"]), rel=0.01)
        assert step["bound"] == ("host-bound" if step["host_ms"] > step["device_ms"] else "device-bound")
        rows, tokens = RECIPES[recipe]
        assert step["tokens_per_second"] == pytest.approx(1e3 * rows * tokens / step["step_ms"])
        assert 0 < sum(kernel["launches"] * kernel["us"] for kernel in step["kernels"]) / 1e3 < step["device_ms"]


def test_predictions_exist() -> None:
    assert FILES


def test_predictions_are_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "2026-11-27.json"
    file.write_text("{}")
    with pytest.raises(Unusable, match="not overwritten"):
        main([str(file), "--recipe", "gla_360m"])
    assert file.read_text() == "{}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_command_predicts_a_tiny_step(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "folder" / "tiny.json"
    command = [sys.executable, "-m", "hybridtron.rehearse.predictions", str(file), "--recipe", "rwkv6_70m", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    predicted = json.loads(file.read_text())
    assert (predicted["gpu"], predicted["about"]) == ("h100", NOTE)
    (step,) = predicted["steps"].values()
    assert step["bound"] == "host-bound"
    assert step["launches"] > 20
    assert any(kernel["name"] == "gla.scores" and kernel["us"] > 0 for kernel in step["kernels"])
