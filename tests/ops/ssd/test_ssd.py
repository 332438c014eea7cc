"""The scan of Mamba-2 compared with numbers worked out by hand.

Tests for all recurrences are in `test_recurrences`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.ssd import SSDInputs, chunked, ssd_scan
from tests.ops.recurrences import TWO_DOCUMENTS, computed, run, ssd_inputs

FORMS = pytest.mark.parametrize("form", ["reference", "chunked", "native"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens, so that 11 tokens are two whole chunks and a ragged one."""
    monkeypatch.setattr(chunked, "CHUNK", 4)


@FORMS
def test_ssd_of_three_tokens_equals_hand_computed_values(form: str) -> None:
    ones = torch.ones(1, 3, 1, 1)
    zero = torch.zeros(1)
    # softplus(0) = log 2, and exp(-log 2) = 1/2: the state is halved and gains log 2 at every step
    y, state = run(ssd_scan, form, SSDInputs(ones, 0 * ones[..., 0], torch.tensor([-1.0]), ones, ones, zero, zero))
    assert_close(y.flatten(), math.log(2) * torch.tensor([1, 1.5, 1.75]))
    assert_close(state.flatten(), math.log(2) * torch.tensor([1.75]))


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_ssd_equals_the_selective_scan_with_one_decay_a_head(form: str) -> None:
    """Mamba-1's scan, whose reference is tested on its own, with A and dt repeated over a head's channels."""
    inputs = ssd_inputs(groups=1)._replace(documents_BL=TWO_DOCUMENTS)
    x, dt, A, B, C, D, dt_bias, state, _ = inputs
    y, last = run(ssd_scan, form, inputs)
    rows, length, heads, head = x.shape

    def channels(per_head: Tensor) -> Tensor:
        return per_head.repeat_interleave(head, dim=-1)

    A_EN = channels(A)[:, None].expand(-1, B.shape[-1])
    per_channel = ScanInputs(
        x.flatten(2), channels(dt), A_EN, B[:, :, 0], C[:, :, 0], channels(D), channels(dt_bias), None,
        state.flatten(1, 2), TWO_DOCUMENTS,
    )  # fmt: skip
    expected, last_expected = selective_scan.reference.function(per_channel)
    assert_close(y, expected.view(rows, length, heads, head))
    assert_close(last, last_expected.view_as(last))


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_ssd_without_decay_has_a_running_sum_as_its_state(form: str) -> None:
    inputs = ssd_inputs()._replace(A_H=torch.zeros(4, dtype=torch.float64))
    x, dt, _, B, C, D, dt_bias, state, _ = inputs
    B, C = (t.repeat_interleave(2, dim=2) for t in (B, C))
    gains = torch.einsum("blh,blhp,blhn->blhpn", F.softplus(dt + dt_bias), x, B)
    h = state.unsqueeze(1) + gains.cumsum(1)
    y, last = run(ssd_scan, form, inputs)
    assert_close(y, torch.einsum("blhn,blhpn->blhp", C, h) + D[:, None] * x)
    assert_close(last, h[:, -1])


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("form", ["chunked", "native"])
@pytest.mark.usefixtures("small_chunks")
def test_fast_forms_equal_the_reference_with_groups_of_heads(form: str, heads: int, groups: int) -> None:
    inputs = ssd_inputs(heads=heads, groups=groups)._replace(documents_BL=TWO_DOCUMENTS)
    assert_close(computed(ssd_scan, form, inputs), computed(ssd_scan, "reference", inputs))


@FORMS
def test_ssd_of_one_token_is_one_step(form: str) -> None:
    inputs = ssd_inputs(length=1, dtype=torch.float32)
    x, dt, A, B, C, D, dt_bias, state, _ = inputs
    delta = F.softplus(dt + dt_bias)[:, 0, :, None, None]
    B, C = (t[:, 0].repeat_interleave(2, dim=1) for t in (B, C))
    h = torch.exp(delta * A[:, None, None]) * state + delta * x[:, 0].unsqueeze(3) * B.unsqueeze(2)
    y, last = run(ssd_scan, form, inputs)
    assert_close(last, h)
    assert_close(y[:, 0], (h * C.unsqueeze(2)).sum(-1) + D[:, None] * x[:, 0])
