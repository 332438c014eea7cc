"""The scan of Mamba-2 by a stand-in for the mamba-ssm package: calls that it gets, and calls that it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import Package
from hybridtron.ops.ssd import SSDInputs, mamba_ssm, ssd_scan
from tests.ops.recurrences import TWO_DOCUMENTS, computed, documents_of, run, ssd_inputs

FORM = "mamba-ssm"


@pytest.fixture(autouse=True)
def _stand_in_for_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(mamba_chunk_scan_combined=upstream_scan)
    monkeypatch.setattr(mamba_ssm, "optional_package", lambda name: Package(name, module, "stand-in"))


def upstream_scan(
    x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, seq_idx, dt_softplus, return_final_states
) -> tuple[Tensor, Tensor]:
    """mamba_ssm's function with its limits: one type of products, fp32 parameters, documents counted from 0."""
    assert dt_softplus
    assert return_final_states
    assert chunk_size & (chunk_size - 1) == 0
    assert x.dtype == B.dtype == C.dtype != torch.float64
    assert A.dtype == D.dtype == dt_bias.dtype == torch.float32
    assert initial_states is None or initial_states.dtype == torch.float32
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert not seq_idx[:, 0].any(), "the state that comes in belongs to document 0"
    return ssd_scan.reference.function(SSDInputs(x, dt, A, B, C, D, dt_bias, initial_states, seq_idx))


@pytest.mark.parametrize("documents", [None, documents_of(60, 4, 36)], ids=["stream", "documents"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_ssm_form_equals_the_reference(documents: Tensor | None, state: bool, dtype: torch.dtype) -> None:
    inputs = ssd_inputs(length=100, heads=8, head=16, size=16, dtype=dtype)._replace(documents_BL=documents)
    if not state:
        inputs = inputs._replace(state_BHPN=None)
    actual, reference = (computed(ssd_scan, form, inputs) for form in (FORM, "reference"))
    close = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    for name, expected in reference.items():
        assert actual[name].dtype == expected.dtype
        assert_close(actual[name], expected, rtol=4 * close, atol=close * expected.abs().max().item())


def test_mamba_ssm_form_refuses_float64() -> None:
    form = ssd_scan.named(FORM)
    assert form.device == "cuda"
    assert form.unsupported_reason(ssd_inputs(dtype=torch.float32)._replace(documents_BL=TWO_DOCUMENTS)) is None
    assert "float64" in form.unsupported_reason(ssd_inputs())


def test_mamba_ssm_form_accepts_mixed_types() -> None:
    mixed = ssd_inputs(dtype=torch.bfloat16)
    mixed = mixed._replace(x_BLHP=mixed.x_BLHP.float())
    actual, expected = (run(ssd_scan, form, mixed) for form in (FORM, "reference"))
    assert_close(actual, expected, rtol=2**-7, atol=1e-3)
