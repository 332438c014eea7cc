"""`hybridtron check gpu` without a GPU: its message, and a rehearsal of everything that it would run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.device import compute_device
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.proving.gpu import correct as gpu_correct
from hybridtron.proving.gpu.main import PARTS, main
from hybridtron.proving.measuring import BenchReport

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="runs for real where there is a CUDA device")


def test_check_without_a_gpu_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("This machine has no CUDA device")
    assert all(part in said for part in PARTS)


def test_wrong_form_misses_every_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate_and_up_swapped(inputs: SwiGLUInputs) -> Tensor:
        gate, up = inputs.gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(up) * gate

    monkeypatch.setattr(swiglu, "implementations", (Implementation("swapped", gate_and_up_swapped),))
    only: dict[str, list[dict[str, Any]]] = {kind: [] for kind in gpu_correct.OPTIONS}
    only["swiglu"] = gpu_correct.OPTIONS["swiglu"]
    monkeypatch.setattr(gpu_correct, "OPTIONS", only)
    report = BenchReport("wrong", quick=True)
    gpu_correct.correctness(report)
    assert {cells[0] for cells in report.tables[-1].cells} == {
        "swiglu hidden=512",
        "swiglu hidden=512 gate_multiplier=0.5",
        *gpu_correct.ADAPTERS,
        "swiglu",
        "linear",
        "rms_norm",
        "add_rms_norm",
        "gated_squares",
        "gated_scale",
        "linear_cross_entropy",
        "dropout",
        "sparse_attention",
    }
    assert not any(goal.reached for goal in report.goals)


def test_failed_part_has_an_infinite_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> list[gpu_correct.Found]:
        raise RuntimeError("an illegal memory access was encountered")

    errors = gpu_correct._run_part("kda", fails)
    assert errors == [("kda FAILED", dtype, math.inf) for dtype in gpu_correct.TOLERANCES]
    assert "illegal" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_side_by_side_have_the_results_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTIONS", "SPECS"):  # of this process, which decides what the others do
        monkeypatch.setattr(gpu_correct, name, {"swiglu": getattr(gpu_correct, name)["swiglu"]})
    alone, beside = (list(gpu_correct._all(ModelSizes(64, 4), 128, several)) for several in (False, True))
    assert [result[:2] for result in alone] == [result[:2] for result in beside]
    assert max(error for *_, error in beside) < gpu_correct.TOLERANCES[torch.bfloat16]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rehearsed_check_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rehearse", "--output", str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    for what in (
        "samba_421m",
        "samba_1.3b",
        "span_attention",
        "fp8_delayed",
        "fp8_block",
        "attention, full",
        "mamba2_laptop",
    ):
        assert what in table
    assert "FAILED" not in table
    assert "is not measured" not in capsys.readouterr().out  # the reason of a case that is left out
