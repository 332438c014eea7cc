"""The delta rule compared with numbers worked out by hand and closed forms.

Tests for all recurrences are in `test_recurrences`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.delta import DeltaInputs, chunked, delta_scan
from hybridtron.ops.gla import GLAInputs, decay, gla_scan
from tests.ops.recurrences import TWO_DOCUMENTS, changed, computed, delta_inputs, exact, run

FORMS = ["reference", "chunked", "native"]
FAST_FORMS = FORMS[1:]
DOCUMENTS = [pytest.param(None, id="stream"), pytest.param(TWO_DOCUMENTS, id="documents")]
GATES = pytest.mark.parametrize("gate", ["head", "channel"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens in blocks of 2, so that 11 tokens have ragged ones of both."""
    monkeypatch.setattr(chunked, "CHUNK", 5)
    monkeypatch.setattr(decay, "SUB", 2)


def random_inputs(gate: str, *sizes: int, **options: object) -> DeltaInputs:
    return delta_inputs(*sizes, **options, by_channel=gate == "channel")


@pytest.mark.parametrize("form", FORMS)
def test_delta_rule_replaces_values_as_computed_by_hand(form: str) -> None:
    """Three tokens of one key: 8 is written, decays to 4 and moves half-way to 2, then is replaced by 5."""
    key = torch.tensor([0.6, 0.8]).expand(1, 3, 1, 2)
    v = torch.tensor([8.0, 2.0, 5.0]).view(1, 3, 1, 1)
    beta = torch.tensor([1.0, 0.5, 1.0]).view(1, 3, 1)
    g = torch.tensor([0.0, math.log(0.5), 0.0]).view(1, 3, 1, 1)
    y, state = run(delta_scan, form, DeltaInputs(key, key, v, beta, g))
    assert_close(y.flatten(), torch.tensor([8.0, 3.0, 5.0]))
    assert_close(state.flatten(), torch.tensor([3.0, 4.0]))


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_delta_rule_of_orthonormal_keys_is_an_exact_dictionary(form: str, gate: str) -> None:
    """16 keys are written, then all again with other values: each leads to its last value."""
    keys = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q
    order = torch.cat((torch.arange(16), torch.randperm(16)))
    values = torch.randn(32, 5, dtype=torch.float64)
    inputs = random_inputs(gate, 1, 80, 1, 16, 5)
    k = F.pad(keys[order], (0, 0, 0, 48)).view(1, 80, 1, 16)  # a key of zeros writes nothing
    v = F.pad(values, (0, 0, 0, 48)).view(1, 80, 1, 5)
    q = keys.repeat(5, 1).view(1, 80, 1, 16)
    ones = torch.ones(1, 80, 1, dtype=torch.float64)
    y, state = run(delta_scan, form, DeltaInputs(q, k, v, ones, torch.zeros_like(inputs.g_BLHG)))
    newest = values[16:][order[16:].argsort()]
    assert_close(y[0, :16, 0], values[:16])
    assert_close(y[0, 32:48, 0], newest)
    assert_close(state[0, 0], keys.T @ newest)


@GATES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_delta_rule_without_steps_only_decays(form: str, gate: str) -> None:
    inputs = random_inputs(gate)
    inputs = inputs._replace(beta_BLH=torch.zeros_like(inputs.beta_BLH))
    q, k, v, _, g, state, _ = inputs
    left = g.cumsum(1).exp().unsqueeze(4) * state.unsqueeze(1)
    y, last = run(delta_scan, form, inputs)
    assert_close(y, (q.unsqueeze(4) * left).sum(3))
    assert_close(last, left[:, -1])
    decayed = gla_scan(GLAInputs(q, k, torch.zeros_like(v), g.expand_as(q), state))
    assert_close((y, last), decayed)


@GATES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_delta_rule_of_orthogonal_keys_equals_gla(form: str, gate: str) -> None:
    """Orthogonal keys find no stored values, so this is gated linear attention with values beta v."""
    inputs = random_inputs(gate, key=12)
    k = torch.linalg.qr(torch.randn(2, 2, 12, 11, dtype=torch.float64)).Q.permute(0, 3, 1, 2)
    g = inputs.g_BLHG[..., :1].expand_as(inputs.g_BLHG)  # the same for all channels: keys stay orthogonal
    inputs = inputs._replace(k_BLHN=k, g_BLHG=g, state_BHNP=None)
    q, _, v, beta, _, _, _ = inputs
    expected = gla_scan(GLAInputs(q, k, beta.unsqueeze(3) * v, g.expand_as(q), None))
    assert_close(run(delta_scan, form, inputs), expected)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_equal_decays_of_all_channels_equal_one_decay_of_the_head(form: str, documents: Tensor | None) -> None:
    by_head = random_inputs("head")._replace(documents_BL=documents)
    by_channel = changed(by_head._replace(g_BLHG=by_head.g_BLHG.expand_as(by_head.k_BLHN)), Tensor.clone)
    expected, results = (computed(delta_scan, form, inputs) for inputs in (by_head, by_channel))
    results["g_BLHG"] = results["g_BLHG"].sum(-1, keepdim=True)
    assert_close(results, expected)


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_tokens_with_total_decay_read_themselves_alone(form: str, gate: str) -> None:
    inputs = random_inputs(gate, length=80)
    q, k, v, beta, g, _, _ = inputs
    y, last = run(delta_scan, form, inputs._replace(g_BLHG=torch.full_like(g, -1e4)))
    u = beta.unsqueeze(3) * v
    assert_close(y, (q * k).sum(-1, keepdim=True) * u)
    assert_close(last, k[:, -1].unsqueeze(3) * u[:, -1].unsqueeze(2))


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize("strength", [-8.0, -80.0])
def test_strong_decays_neither_overflow_nor_blur_the_weak_ones(strength: float, form: str, gate: str) -> None:
    """Some keys forget e^8 (or all) at every token, or at one in five, and some little; or a head does now and then."""
    inputs = random_inputs(gate, rows=1, length=256, key=4, dtype=torch.float32)
    with torch.no_grad():
        inputs.g_BLHG.fill_(-1e-3)
        if gate == "channel":
            inputs.g_BLHG[..., 0] = strength
        inputs.g_BLHG[:, 3::5, :, -1] = strength
    results = computed(delta_scan, form, inputs)
    for name, theirs in computed(delta_scan, "reference", exact(inputs)).items():
        assert (results[name].double() - theirs).norm() <= 5e-6 * theirs.norm(), name


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
def test_repeated_key_with_steps_of_two_stays_accurate(form: str, gate: str) -> None:
    """The triangular system is as full as possible, and steps of 2 flip a value: rounding errors grow with its size."""
    inputs = random_inputs(gate, rows=1, length=256, key=16, dtype=torch.float32)
    with torch.no_grad():
        inputs.k_BLHN.copy_(inputs.k_BLHN[:, :1].expand_as(inputs.k_BLHN))
        inputs.beta_BLH.fill_(2)
        inputs.g_BLHG.fill_(-1e-3)
    results = computed(delta_scan, form, inputs)
    for name, theirs in computed(delta_scan, "reference", exact(inputs)).items():
        assert (results[name].double() - theirs).norm() <= 5e-4 * theirs.norm(), name
