"""Steps by other packages' kernels, where stubs with their signatures count as installed."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtron.planning.activations import MARGIN
from hybridtron.planning.rates import GAINS
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.one_slice, PATIENT]
Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return printed_by("package_steps", processor_s=600)


def summed(report: Report, value: str, kind: str) -> float:
    return sum(cost[value] for cost in report["per_micro_batch"]["costs"] if cost["kind"] == kind)


def test_forms_of_installed_packages_are_chosen(reports: dict[str, Report]) -> None:
    chosen = reports["mamba2"]["implementations"]
    wanted = {"attention": "flash-attn-3", "causal_conv": "causal-conv1d", "selective_scan": "mamba-ssm"}
    assert wanted.items() <= chosen.items()
    assert chosen["ssd_scan"] == "mamba-ssm"
    for name in ("laptop", "mamba2"):
        assert not {"scan", "ssd", "conv"} & {kernel["name"].partition(".")[0] for kernel in reports[name]["kernels"]}
        assert summed(reports[name], "bytes", "conv") > 0


def test_versions_of_flash_attention_have_their_rates(reports: dict[str, Report]) -> None:
    """Products are equal. Seconds follow the versions' gains where products bind."""
    third, fourth, isolated = (reports[name] for name in ("laptop", "flash 4", "isolated"))
    assert summed(third, "flops", "attention") == summed(fourth, "flops", "attention") > 0
    assert summed(isolated, "flops", "attention") == summed(fourth, "flops", "attention")
    assert summed(third, "seconds", "attention") <= summed(fourth, "seconds", "attention")
    assert GAINS["flash-3"] > GAINS["flash-4"] > 1


def test_torch_attention_is_rehearsed_as_one_kernel(reports: dict[str, Report]) -> None:
    """A build without CUDA would make all scores."""
    flash = reports["flash"]
    torch_report = reports["torch's own"]
    for value in ("launches", "bytes", "flops"):
        assert summed(torch_report, value, "attention") == summed(flash, value, "attention") > 0
    assert torch_report["memory"]["peak"] == pytest.approx(flash["memory"]["peak"], rel=0.03)


def test_document_boundaries_of_a_batch_cause_no_waits(reports: dict[str, Report]) -> None:
    """Attention asked the device for them, in every layer of every micro-batch."""
    assert (reports["isolated"]["per_micro_batch"]["waits"], reports["isolated"]["once"]["waits"]) == (0, 1)


def test_fp8_products_have_equal_flops_and_take_less_time(reports: dict[str, Report]) -> None:
    plain = reports["laptop"]
    eighth = reports["fp8"]
    assert summed(eighth, "flops", "products") == summed(plain, "flops", "products")
    assert summed(eighth, "launches", "casts to FP8") > 0
    assert summed(plain, "launches", "casts to FP8") == 0
    assert summed(eighth, "seconds", "products") < summed(plain, "seconds", "products")


@pytest.mark.parametrize("number", range(4))
def test_planned_memory_of_fp8_is_within_its_margin(reports: dict[str, Report], number: int) -> None:
    """FP8 keeps one cast input per product and transposed weights, in place of bf16 inputs."""
    memory = reports[f"planned {number}"]["memory"]
    assert memory["planned"] == pytest.approx(memory["peak"], rel=MARGIN)
