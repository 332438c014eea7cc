"""Whole models with every op in its Triton form, states carried and gradients flowing back through them; and the
start-up table of a machine that has Triton and no other package of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.device import Package, compute_device
from hybridtron.ops import dispatch
from hybridtron.ops.dispatch import force
from hybridtron.ops.loss import CrossEntropyInputs, cross_entropy
from hybridtron.ops.registry import OPS, choices
from tests.conftest import random_batch, small_model

pytestmark = pytest.mark.usefixtures("interpreter")

TOKENS = 4  # of each of the two rows

FORMS = dict.fromkeys(("selective_scan", "causal_conv", "ssd_scan", "rms_norm", "add_rms_norm"), "triton")


def step(pattern: str, dtype: torch.dtype, device: torch.device, forms: dict[str, str]) -> dict[str, Tensor]:
    """Return the loss over two equal parts of a row, with states passed on, and every gradient by weight name."""
    torch.manual_seed(1)
    model = small_model(pattern, dtype).to(device)
    batch = random_batch(rows=1, length=2 * TOKENS).to(device)
    loss = torch.zeros((), dtype=dtype, device=device)
    states = None
    with force("reference"), force(**forms):
        for tokens in (slice(TOKENS), slice(TOKENS, None)):
            logits, states, *_ = model(batch.tokens_BL[:, tokens], states, SeqInfo.stream(1, TOKENS, device=device))
            labels, mask = (t[:, tokens].transpose(0, 1) for t in (batch.labels_BL, batch.mask_BL))
            loss = loss + cross_entropy(CrossEntropyInputs(logits, labels, mask, 0.0)).total
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [pytest.param("M-W-", marks=pytest.mark.slow, id="Samba"), pytest.param("S-W-", id="Mamba-2 hybrid")]
)
def test_step_with_triton_forms_equals_the_reference(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.scan import kernels as selective_scan  # imported again for the interpreter
    from hybridtron.ops.scan import kernels_backward as selective_scan_backward
    from hybridtron.ops.ssd import kernels_row

    for module in (selective_scan, selective_scan_backward):
        monkeypatch.setattr(module, "CHUNK", TOKENS)  # which the interpreter walks one by one
    monkeypatch.setattr(selective_scan_backward, "TILE", TOKENS)
    monkeypatch.setattr(kernels_row, "tiles", lambda *_: kernels_row.ProductTiles(16, tokens=16, inner=16, outer=16))
    expected = step(pattern, torch.float64, torch.device("cpu"), {})
    actual = step(pattern, torch.float32, compute_device(), FORMS)
    assert actual.keys() == expected.keys()
    for name, theirs in expected.items():
        error = (actual[name].cpu().double() - theirs).norm() / theirs.norm()
        assert error <= 2e-5, f"{name} is off by {error:.2g}"


def test_triton_forms_run_where_no_other_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def triton_alone(name: str) -> Package:
        if name == "triton":
            return Package(name, dispatch, "stand-in")
        return Package(name, None, "not installed")

    monkeypatch.setattr(dispatch, "optional_package", triton_alone)
    table = {name: (form, reason) for name, form, reason in choices("cuda")}
    with_kernels = {name for name, op in OPS.items() if any(form.name == "triton" for form in op.implementations)}
    assert with_kernels >= FORMS.keys()
    assert {table[name][0] for name in with_kernels} == {"triton"}
    assert "mamba-ssm" in table["ssd_scan"][1]


def test_deterministic_runs_take_triton_before_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "optional_package", lambda name: Package(name, dispatch, "stand-in"))
    assert OPS["ssd_scan"].choice("cuda")[0] == "mamba-ssm"
    monkeypatch.setattr(dispatch, "is_deterministic", lambda: True)
    form, reason = OPS["ssd_scan"].choice("cuda")
    assert form == "triton"
    assert "run.deterministic" in reason
