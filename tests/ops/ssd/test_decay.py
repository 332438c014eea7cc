"""The recurrence in SSD by itself, compared with the scan and gated linear attention, and by Triton kernels.

Tests for all recurrences are in `test_recurrences`.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.ssd import SSDInputs, chunked, decay_scan, ssd_scan
from tests.ops.compiling import compile_calls
from tests.ops.recurrences import TWO_DOCUMENTS, assert_near_reference, decay_inputs, documents_of, run
from tests.ops.ssd.test_kernels import cut_in


@pytest.mark.parametrize("form", ["reference", "chunked", "native"])
def test_decay_scan_equals_ssd_with_steps_of_one_and_gla_with_equal_decays(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """softplus(dt) = 1 and A = -0.3, in the scan's reference; and GLA's with the same decay for all key channels."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    g = torch.full((2, 11, 4), -0.3, dtype=torch.float64)
    inputs = decay_inputs()._replace(g_BLH=g, documents_BL=TWO_DOCUMENTS, step_BLH=None, own_step_BLH=None, D_H=None)
    q, k, v, _, state, *_ = inputs
    dt = torch.full((2, 11, 4), 0.541324854612918, dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    scan = SSDInputs(v, dt, zero - 0.3, k, q, zero, zero, state, TWO_DOCUMENTS)
    y, last = run(decay_scan, form, inputs)
    assert_close((y, last), ssd_scan.reference.function(scan))
    q, k = (t.repeat_interleave(2, dim=2) for t in (q, k))
    linear = GLAInputs(q, k, v, g.unsqueeze(3).expand_as(k), state.mT, TWO_DOCUMENTS)
    assert_close((y, last.mT), gla_scan.reference.function(linear))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["reference", "chunked", "native"])
def test_later_steps_change_no_bit_of_earlier_outputs(form: str, dtype: torch.dtype) -> None:
    """Later steps do not change a bit of a token's own contribution, within a chunk and at its end."""
    assert_unseen(form, 130, (0, 17, 63, 127), dtype)


@pytest.mark.usefixtures("interpreter", "bf16_products")
def test_later_steps_change_no_bit_of_earlier_outputs_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 16, tokens=16, inner=16, outer=16)
    assert_unseen("triton", 18, (7,), torch.bfloat16)


def assert_unseen(form: str, length: int, places: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = decay_inputs(1, length, 2, 4, 1, 4, dtype)
    with torch.no_grad():
        y, _ = run(decay_scan, form, inputs)
        for place in places:
            step_BLH = inputs.step_BLH.clone()
            step_BLH[:, place] += 50
            other, _ = run(decay_scan, form, inputs._replace(step_BLH=step_BLH))
            assert torch.equal(other[:, : place + 1], y[:, : place + 1])
            assert not torch.equal(other[:, place + 1 :], y[:, place + 1 :])


@pytest.mark.slow  # the kernels are those of SSD, whose fast tests run in the interpreter
@pytest.mark.usefixtures("interpreter")
def test_triton_decay_scan_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 16, tokens=8, inner=16, outer=16)
    inputs = decay_inputs(length=43, dtype=torch.float32)._replace(documents_BL=documents_of(5, 27, 11))
    assert_near_reference(decay_scan, "triton", inputs, 2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_triton_decay_scan_slices_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 16, tokens=8, inner=16, outer=16)
    inputs = decay_inputs(length=19, head=258, dtype=torch.float32)._replace(documents_BL=documents_of(5, 3, 11))
    assert_near_reference(decay_scan, "triton", inputs, 2e-6)


def test_triton_decay_scan_refuses_unsupported_sizes() -> None:
    form = decay_scan.named("triton")
    assert form.unsupported_reason(decay_inputs(dtype=torch.float32)) is None
    assert form.unsupported_reason(decay_inputs(head=512, dtype=torch.float32)) is None
    assert "129 channels" in form.unsupported_reason(decay_inputs(head=129, dtype=torch.float32))


def shipped() -> None:
    """Forward and backward at the sizes of Mamba-3's recipes, whose heads have keys of their own."""
    with torch.device("meta"):
        inputs = decay_inputs(8, 4096, 48, 64, 48, 128, torch.bfloat16)
        steps = {name: torch.empty(8, 4096, 48, requires_grad=True) for name in ("g_BLH", "step_BLH", "own_step_BLH")}
    y, last = decay_scan.named("triton").function(inputs._replace(**steps))
    torch.autograd.backward((y, last), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {"outputs", "token_gradients", "group_gradients", "step_gradients"} < {launch.kernel for launch in launches}
    assert [fault for launch in launches for fault in launch.faults()] == []
