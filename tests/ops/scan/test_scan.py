"""The selective scan compared with numbers worked out by hand.

Tests for all recurrences are in `test_recurrences`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.scan import ScanInputs, chunked, recurrence, selective_scan
from tests.ops.recurrences import TWO_DOCUMENTS, by_token, changed, computed, run, scan_inputs

FORMS = pytest.mark.parametrize("form", ["reference", "chunked", "native"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 4 tokens: 11 tokens are two full chunks of groups and a ragged one, taken token by token."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    monkeypatch.setattr(recurrence, "GROUP", 2)


@FORMS
def test_scan_of_three_tokens_equals_hand_computed_values(form: str) -> None:
    ones = torch.ones(1, 3, 1)
    zero = torch.zeros(1)
    # softplus(0) = log 2, and exp(-log 2) = 1/2: the state is halved and gains log 2 at every step
    inputs = ScanInputs(ones, 0 * ones, torch.tensor([[-1.0]]), ones, ones, zero, zero)
    y, state = run(selective_scan, form, inputs)
    assert_close(y.flatten(), math.log(2) * torch.tensor([1, 1.5, 1.75]))
    assert_close(state.flatten(), math.log(2) * torch.tensor([1.75]))


@pytest.fixture(params=[recurrence.LARGE_STATE, 0], ids=["side_by_side", "one_by_one"])
def one_by_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "LARGE_STATE", request.param)


@pytest.mark.usefixtures("small_chunks", "one_by_one")
@FORMS
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("begins", [1, 2, 4, 7, 9])  # chunks begin at 4 and 8
def test_values_that_are_not_finite_stay_in_their_document(form: str, value: float, begins: int) -> None:
    """Neither a state that is not finite, forward, nor such a gradient, backward."""
    sound = scan_inputs()._replace(documents_BL=(torch.arange(11) >= begins).int().expand(2, -1))
    broken = changed(sound, Tensor.clone)
    tokens = by_token(sound)
    with torch.no_grad():
        broken.state_BEN[0] = value
        for tensor in (broken.x_BLE, broken.dt_BLE, broken.B_BLN):
            tensor[0, :begins] = value
    results = []
    for inputs in (sound, broken):
        y, last = run(selective_scan, form, inputs)
        (y[:, begins:].square().sum() + last.sum()).backward()
        results.append((y[:, begins:], last, *(getattr(inputs, name).grad[:, begins:] for name in tokens)))
    assert all(map(torch.equal, results[0], results[1]))

    wanted = [getattr(sound, name) for name in tokens]
    y, last = run(selective_scan, form, sound)
    grads = torch.autograd.grad([y, last], wanted, [y.detach(), last * value])
    y, last = run(selective_scan, form, sound)
    expected = torch.autograd.grad([y, last], wanted, [y.detach(), 0 * last])
    assert all(torch.equal(ours[:, :begins], theirs[:, :begins]) for ours, theirs in zip(grads, expected, strict=True))


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_scan_without_decay_has_a_running_sum_as_its_state(form: str) -> None:
    inputs = scan_inputs()._replace(A_EN=torch.zeros(3, 2, dtype=torch.float64))
    x, dt, _, B, C, D, dt_bias, z, state, _ = inputs
    gains = torch.einsum("ble,ble,bln->blen", F.softplus(dt + dt_bias), x, B)
    h = state.unsqueeze(1) + gains.cumsum(1)
    y, last = run(selective_scan, form, inputs)
    assert_close(y, (torch.einsum("bln,blen->ble", C, h) + D * x) * F.silu(z))
    assert_close(last, h[:, -1])


@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["stream", "documents"])
@pytest.mark.parametrize("form", ["chunked", "native"])
@pytest.mark.usefixtures("small_chunks")
def test_fast_scans_without_a_gate_equal_the_reference(form: str, documents: Tensor | None) -> None:
    inputs = scan_inputs()._replace(z_BLE=None, documents_BL=documents)
    assert_close(computed(selective_scan, form, inputs), computed(selective_scan, "reference", inputs))


@FORMS
def test_scan_of_one_token_is_one_step(form: str) -> None:
    inputs = scan_inputs(length=1)
    x, dt, A, B, C, D, dt_bias, z, state, _ = inputs
    delta = F.softplus(dt + dt_bias).mT
    h = delta * x.mT * B + torch.exp(delta * A) * state
    y, last = run(selective_scan, form, inputs)
    assert_close(last, h)
    assert_close(y, ((h @ C.mT).mT + D * x) * F.silu(z))
