"""The table of kernels at the start of a run."""

from __future__ import annotations

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.ops.registry import OPS
from hybridtron.train.report import device_warnings, ops_of
from tests.conftest import small_config

LOSS = {"linear_cross_entropy", "softmax_sums", "softmax_gradients"}
NORMS = {"rms_norm", "add_rms_norm"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("M-", {"causal_conv", "selective_scan", "swiglu"}),
        ("W-", {"attention", "apply_rope", "causal_conv", "swiglu"}),  # its short convolution, where one is asked for
        ("S", {"causal_conv", "ssd_scan", "gated_norm", "gated_squares", "gated_scale"}),
    ],
)
def test_the_report_lists_ops_of_the_model(pattern: str, expected: set[str]) -> None:
    assert ops_of(architecture(small_config(pattern))) == LOSS | NORMS | expected
    assert all(len(OPS[name].choice("cpu")[1]) < 44 for name in expected)  # beside name and form on 80 columns


def test_the_report_lists_ops_of_routing_and_experts() -> None:
    listed = ops_of(architecture(load(["recipe=moe_laptop"]).model))
    assert listed >= {"experts", "route", "expert_choice", "expert_order", "to_experts", "mlp_of_rows", "from_experts"}
    assert "expert_linear" in listed


@pytest.mark.parametrize(
    ("settings", "device", "warned"),
    [
        (["recipe=moe_laptop"], "cuda", True),
        (["recipe=moe_laptop", "precision=bf16"], "cuda", False),
        (["recipe=moe_laptop"], "cpu", False),
        (["recipe=laptop"], "cuda", False),
    ],
)
def test_experts_in_fp32_on_a_gpu_are_reported_as_slow(settings: list[str], device: str, warned: bool) -> None:
    config = load(settings)
    texts = list(device_warnings(architecture(config.model), config, device))
    assert any("experts run one after the other" in text for text in texts) == warned
