"""The selective scan by a stand-in for the mamba-ssm package: calls that it gets, and calls that it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import Package
from hybridtron.ops import dispatch
from hybridtron.ops.scan import ScanInputs, mamba_ssm, selective_scan
from tests.ops.recurrences import TWO_DOCUMENTS, computed, cut, gradients, run, scan_inputs, some_loss

FORM = "mamba-ssm"


@pytest.fixture(autouse=True)
def _stand_in_for_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(selective_scan_fn=upstream_scan)
    monkeypatch.setattr(mamba_ssm, "optional_package", lambda name: Package(name, module, "stand-in"))


def upstream_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state) -> tuple[Tensor, Tensor]:
    """mamba_ssm's selective_scan_fn with its limits: one type, from zero, a last state without a gradient."""
    assert delta_softplus
    assert return_last_state
    assert {t.dtype for t in (delta, B, C)} == {u.dtype}
    assert z is None or z.dtype == u.dtype
    inputs = ScanInputs(u.mT, delta.mT, A, B.mT, C.mT, D, delta_bias)
    if z is not None:
        inputs = inputs._replace(z_BLE=z.mT)
    y, last = selective_scan.reference.function(inputs)
    return y.mT, last.detach()


def from_zero(*sizes: int, **options: object) -> ScanInputs:
    return scan_inputs(*sizes, **options)._replace(state_BEN=None)


@pytest.mark.parametrize("gate", [True, False])
def test_mamba_ssm_scan_equals_the_reference(gate: bool) -> None:
    """The state's gradient agrees too, which the package's function does not give."""
    inputs = from_zero(2, 150, 24, 4, dtype=torch.float32)
    if not gate:
        inputs = inputs._replace(z_BLE=None)
    actual, reference = (computed(selective_scan, form, inputs) for form in (FORM, "reference"))
    for name, expected in reference.items():
        assert_close(actual[name], expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


def test_rows_begun_by_mamba_ssm_continue_in_another_form() -> None:
    inputs = from_zero()
    whole, last = run(selective_scan, FORM, inputs)
    expected = gradients(some_loss(whole, last), inputs)
    for place in range(1, 11):
        first, state = run(selective_scan, FORM, cut(inputs, slice(place), None))
        second, state = run(selective_scan, "chunked", cut(inputs, slice(place, None), state))
        joined = torch.cat([first, second], dim=1)
        assert_close((joined, state), (whole, last))
        assert_close(gradients(some_loss(joined, state), inputs), expected)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    inputs = from_zero(2, 100, dtype=torch.bfloat16)
    actual, expected = (computed(selective_scan, form, inputs) for form in (FORM, "reference"))
    assert (actual["y"].dtype, actual["last"].dtype) == (torch.bfloat16, torch.float32)
    assert_close(actual["last"], expected["last"], rtol=1e-5, atol=1e-5)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert_close(actual[name].float(), value.float(), rtol=2**-7, atol=2**-7 * value.abs().max().item())


def test_mamba_ssm_scan_refuses_unsupported_inputs() -> None:
    def reason(inputs: ScanInputs) -> str | None:
        return selective_scan.named(FORM).unsupported_reason(inputs)

    assert selective_scan.named(FORM).device == "cuda"
    inputs = from_zero(dtype=torch.float32)
    assert reason(inputs) is None
    assert "document" in reason(inputs._replace(documents_BL=TWO_DOCUMENTS))
    assert "float64" in reason(from_zero())
    assert "257" in reason(from_zero(size=257, dtype=torch.float32))
    assert "initial" in reason(scan_inputs(dtype=torch.float32))


@pytest.mark.parametrize(
    ("packages", "with_state", "runs"),
    [
        ({mamba_ssm.PACKAGE, "triton"}, False, "mamba-ssm"),
        ({mamba_ssm.PACKAGE, "triton"}, True, "triton"),
        ({"triton"}, False, "triton"),
        (set(), True, "chunked"),
    ],
)
def test_rows_with_a_state_select_kernels_that_accept_one(
    packages: set[str], with_state: bool, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> Package:
        if name in packages:
            return Package(name, SimpleNamespace(), "stand-in")
        return Package(name, None, "not installed")

    monkeypatch.setattr(dispatch, "optional_package", installed)
    monkeypatch.setattr(dispatch, "device_of", lambda inputs: "cuda")
    inputs = scan_inputs(dtype=torch.float32)
    if not with_state:
        inputs = inputs._replace(state_BEN=None)
    assert selective_scan.selected(inputs).name == runs


def test_mamba_ssm_scan_accepts_mixed_types() -> None:
    mixed = from_zero(dtype=torch.bfloat16)
    mixed = mixed._replace(dt_BLE=mixed.dt_BLE.float())
    actual, expected = (run(selective_scan, form, mixed) for form in (FORM, "reference"))
    assert_close(actual, expected, rtol=2**-7, atol=1e-3)
