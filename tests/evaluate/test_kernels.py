"""The kernels that results record: on a GPU those of each case of attention, as the table chooses them."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.table import Architecture
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.evaluate.kernels import kernels_of, reading_cases
from hybridtron.ops.attention import table

LAPTOP = ("recipe=laptop", "model.layers.W.window=64")


def arch_of(*settings: str) -> Architecture:
    return RunPlan.of(load([*LAPTOP, *settings])).arch


def test_results_have_the_kernel_of_each_case_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compute_capability", lambda: (9, 0))
    kernels = kernels_of(arch_of(), torch.bfloat16, 512, "cuda")
    attention = {name: form for name, form in kernels.items() if name.startswith("attention")}
    assert attention["attention W, later chunks"] == "flex"
    assert attention["attention W, generated tokens"] == "blocked"
    assert attention["attention W"] in {row.name for row in table.TABLE if row.window}
    assert len(attention) == 3
    assert "swiglu" in kernels
    assert "ssd_scan" not in kernels


def test_results_on_a_cpu_have_one_form_of_attention() -> None:
    kernels = kernels_of(arch_of(), torch.float32, 512, "cpu")
    assert [name for name in kernels if name.startswith("attention")] == ["attention"]


@pytest.mark.parametrize(
    ("settings", "tokens", "window"),
    [([], 512, True), ([], 64, False), (["model.layers.W={kind: span}"], 512, False)],
)
def test_reading_has_the_window_of_evaluation(settings: list[str], tokens: int, window: bool) -> None:
    """A window as long as the text hides nothing, and span attention reads as full attention."""
    cases = reading_cases(arch_of(*settings), torch.bfloat16, tokens)
    assert {case.window for case in cases.values()} == {window}
    assert cases["attention W"].length == tokens


def test_attention_without_kernels_has_no_case() -> None:
    extended = "model.layers.W.self_extend={group: 4, neighbours: 64}"
    assert reading_cases(arch_of("model.layers.W.window=null", extended), torch.bfloat16, 512) == {}
