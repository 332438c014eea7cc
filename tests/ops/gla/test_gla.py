"""GLA's recurrence compared with numbers worked out by hand and with other recurrences.

Tests for all recurrences are in `test_recurrences`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from hybridtron.ops.gla import GLAInputs, chunked, decay, gla_scan
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from tests.ops.recurrences import TWO_DOCUMENTS, computed, exact, gla_inputs, run

FORMS = pytest.mark.parametrize("form", ["reference", "chunked", "native"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens in blocks of 2, so that 11 tokens have ragged ones of both."""
    monkeypatch.setattr(chunked, "CHUNK", 5)
    monkeypatch.setattr(decay, "SUB", 2)


@FORMS
def test_gla_of_three_tokens_equals_hand_computed_values(form: str) -> None:
    ones = torch.ones(1, 3, 1, 2)
    g = torch.tensor([-math.log(2), -math.log(4)]).expand(1, 3, 1, 2)  # the state's rows become a half and a quarter
    y, state = run(gla_scan, form, GLAInputs(ones * torch.tensor([1.0, 10.0]), ones, ones[..., :1], g))
    assert_close(state.flatten(), torch.tensor([1.75, 1.3125]))
    assert_close(y.flatten(), torch.tensor([1 + 10, 1.5 + 12.5, 1.75 + 13.125]))


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_gla_without_decay_equals_linear_attention(form: str) -> None:
    inputs = gla_inputs()
    q, k, v, g, state, _ = inputs
    h = state.unsqueeze(1) + torch.einsum("blhn,blhp->blhnp", k, v).cumsum(1)
    y, last = run(gla_scan, form, inputs._replace(g_BLHN=torch.zeros_like(g)))
    assert_close(y, torch.einsum("blhn,blhnp->blhp", q, h))
    assert_close(last, h[:, -1])


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_gla_with_one_decay_for_all_keys_equals_ssd(form: str) -> None:
    inputs = gla_inputs()._replace(documents_BL=TWO_DOCUMENTS)
    q, k, v, g, state, _ = inputs
    zero = torch.zeros(2, dtype=torch.float64)
    steps = (-g[..., 0]).expm1().log()  # softplus of it is -g
    x = v / -g[..., :1]
    same = SSDInputs(x, steps, zero - 1, k, q, zero, zero, state.mT, TWO_DOCUMENTS)
    expected, last = run(ssd_scan, "reference", same)
    actual = run(gla_scan, form, inputs._replace(g_BLHN=g[..., :1].expand_as(g)))
    assert_close(actual, (expected, last.mT))


@FORMS
def test_tokens_with_total_decay_read_themselves_alone(form: str) -> None:
    inputs = gla_inputs(length=40)
    q, k, v, g, _, _ = inputs
    y, last = run(gla_scan, form, inputs._replace(g_BLHN=torch.full_like(g, -1e4)))
    assert_close(y, (q * k).sum(-1, keepdim=True) * v)
    assert_close(last, k[:, -1].unsqueeze(3) * v[:, -1].unsqueeze(2))


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_moderate_decays_at_every_token_stay_accurate(form: str) -> None:
    """With e^-8 a token, a block's exponents are far apart, and adjacent tokens still count for each other."""
    inputs = gla_inputs(rows=1, length=256, key=4, dtype=torch.float32)
    with torch.no_grad():
        inputs.g_BLHN.fill_(-1e-3)
        inputs.g_BLHN[..., 0] = -8
        inputs.g_BLHN[:, ::5, :, 1] = -8
    results = computed(gla_scan, form, inputs)
    for name, expected in computed(gla_scan, "reference", exact(inputs)).items():
        assert (results[name].double() - expected).norm() <= 2e-6 * expected.norm(), name


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_gla_with_queries_one_token_early_equals_rwkv6(form: str) -> None:
    """o_t = r_t (h_{t-1} + diag(u) k_t v_t^T), step by step, against the scan with queries one token early."""
    r, k, v, g, state, _ = gla_inputs()
    u = torch.randn(2, 3, dtype=torch.float64)
    h = state
    expected = []
    for t in range(r.shape[1]):
        step = k[:, t].unsqueeze(3) * v[:, t].unsqueeze(2)
        expected.append(torch.einsum("bhn,bhnp->bhp", r[:, t], h + u.unsqueeze(2) * step))
        h = g[:, t].exp().unsqueeze(3) * h + step
    next_r = torch.cat([r[:, 1:], torch.zeros_like(r[:, :1])], dim=1)
    y, last = run(gla_scan, form, GLAInputs(next_r, k, v, g, state))
    first = torch.einsum("bhn,bhnp->bhp", r[:, 0], state).unsqueeze(1)
    bonus = (r * u * k).sum(-1, keepdim=True) * v
    assert_close(torch.cat([first, y[:, :-1]], dim=1) + bonus, torch.stack(expected, dim=1))
    assert_close(last, h)
