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
    gate = None if z is None else z.mT
    y, last = selective_scan.reference.function(ScanInputs(u.mT, delta.mT, A, B.mT, C.mT, D, delta_bias, gate))
    return y.mT, last.detach()


def from_zero(*sizes: int, **options: object) -> ScanInputs:
    return scan_inputs(*sizes, **options)._replace(state_BEN=None)


@pytest.mark.parametrize("gate", [True, False])
def test_it_equals_the_reference(gate: bool) -> None:
    """The state's gradient agrees too, which the package's function does not give."""
    inputs = from_zero(2, 150, 24, 4, dtype=torch.float32)
    inputs = inputs if gate else inputs._replace(z_BLE=None)
    found, reference = (computed(selective_scan, form, inputs) for form in (FORM, "reference"))
    for name, expected in reference.items():
        assert_close(found[name], expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


def test_a_row_that_it_begins_is_carried_on() -> None:
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
    found, expected = (computed(selective_scan, form, inputs) for form in (FORM, "reference"))
    assert (found["y"].dtype, found["last"].dtype) == (torch.bfloat16, torch.float32)
    assert_close(found["last"], expected["last"], rtol=1e-5, atol=1e-5)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert_close(found[name].float(), value.float(), rtol=2**-7, atol=2**-7 * value.abs().max().item())


def test_what_it_does_not_support() -> None:
    def reason(inputs: ScanInputs) -> str | None:
        return selective_scan.named(FORM).unsupported_reason(inputs)

    assert selective_scan.named(FORM).device == "cuda"
    inputs = from_zero(dtype=torch.float32)
    assert reason(inputs) is None
    assert "document borders" in reason(inputs._replace(documents_BL=TWO_DOCUMENTS))
    assert "float64" in reason(from_zero())
    assert "at most 256, not 257" in reason(from_zero(size=257, dtype=torch.float32))
    assert "no initial state" in reason(scan_inputs(dtype=torch.float32))


@pytest.mark.parametrize(
    ("packages", "with_state", "runs"),
    [
        ({mamba_ssm.PACKAGE, "triton"}, False, "mamba-ssm"),
        ({mamba_ssm.PACKAGE, "triton"}, True, "triton"),
        ({"triton"}, False, "triton"),
        (set(), True, "chunked"),
    ],
)
def test_rows_with_a_state_go_to_kernels_that_take_one(
    packages: set[str], with_state: bool, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> Package:
        return Package(name, SimpleNamespace() if name in packages else None, "as the test says")

    monkeypatch.setattr(dispatch, "optional_package", found)
    monkeypatch.setattr(dispatch, "device_of", lambda inputs: "cuda")
    inputs = (scan_inputs if with_state else from_zero)(dtype=torch.float32)
    assert selective_scan.selected(inputs).name == runs


def test_types_that_differ_are_made_one() -> None:
    mixed = from_zero(dtype=torch.bfloat16)
    mixed = mixed._replace(dt_BLE=mixed.dt_BLE.float())
    found, expected = (run(selective_scan, form, mixed) for form in (FORM, "reference"))
    assert_close(found, expected, rtol=2**-7, atol=1e-3)
