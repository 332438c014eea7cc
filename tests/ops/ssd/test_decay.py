"""The recurrence in SSD by itself: against the scan, gated linear attention, its gradients, and itself cut into pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.ssd import DecayInputs, SSDInputs, chunked, decay_scan, ssd_scan
from tests.ops.ssd.test_kernels import cut
from tests.ops.ssd.test_ssd import DOCUMENTS, TWO_DOCUMENTS, gradients, some_loss

FORMS = ["reference", "chunked", "native"]
PER_TOKEN = ("q", "k", "v", "g")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", 4)


def random_inputs(
    rows: int = 2, length: int = 11, heads: int = 4, head: int = 3, groups: int = 2, size: int = 5, dtype=torch.float64
) -> dict[str, Tensor | None]:
    """Arguments by name, in the op's order; decays weak and strong."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "q": torch.randn(rows, length, groups, size, dtype=dtype),
        "k": torch.randn(rows, length, groups, size, dtype=dtype),
        "v": torch.randn(rows, length, heads, head, dtype=dtype),
        "g": -torch.randn(rows, length, heads, dtype=wide).exp(),
        "state": torch.randn(rows, heads, head, size, dtype=wide),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def run(form: str, inputs: dict[str, Tensor | None], documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with force(decay_scan=form):
        return decay_scan(DecayInputs(*inputs.values(), documents))


def results(form: str, inputs: dict[str, Tensor | None], documents: Tensor | None) -> dict[str, Tensor]:
    y, last = run(form, inputs, documents)
    return {"y": y, "last": last} | gradients(some_loss(y.double(), last.double()), inputs)


def tokens_of(inputs: dict[str, Tensor | None], tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    return {**{name: inputs[name][:, tokens] for name in PER_TOKEN}, "state": state}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, theirs in expected.items():
        error = (found[name].cpu().double() - theirs.double()).norm() / theirs.norm()
        assert error <= tolerance, f"{name} is off by {error:.2g}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_with_steps_of_one_the_scan_is_this(form: str) -> None:
    """softplus(dt) = 1 and A = -0.3, in the scan's reference; and GLA's with the same decay for all key channels."""
    inputs = random_inputs() | {"g": torch.full((2, 11, 4), -0.3, dtype=torch.float64)}
    q, k, v, _, state = inputs.values()
    dt, zero = torch.full((2, 11, 4), 0.541324854612918, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    scan = SSDInputs(v, dt, zero - 0.3, k, q, zero, zero, state, TWO_DOCUMENTS)
    y, last = run(form, inputs, TWO_DOCUMENTS)
    assert_close((y, last), ssd_scan.reference.function(scan))
    q, k = (t.repeat_interleave(2, dim=2) for t in (q, k))
    linear = GLAInputs(q, k, v, inputs["g"].unsqueeze(3).expand_as(k), state.mT, TWO_DOCUMENTS)
    assert_close((y, last.mT), gla_scan.reference.function(linear))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_slopes(form: str, documents: Tensor | None, groups: int) -> None:
    inputs = random_inputs(head=2, size=2, groups=groups)

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(form, dict(zip(inputs, tensors, strict=True)), documents)

    assert torch.autograd.gradcheck(outputs, [*inputs.values()], fast_mode=groups > 1)


@pytest.mark.parametrize("documents", [None, [60, 4, 236]], ids=str)
@pytest.mark.parametrize("form", ["chunked", "native"])
def test_fast_forms_equal_the_reference(form: str, documents: list[int] | None) -> None:
    """In fp32, with decays that forget all beside weak ones."""
    index = None if documents is None else torch.arange(5, 8).repeat_interleave(torch.tensor(documents)).expand(2, -1)
    inputs = random_inputs(length=300, heads=4, head=16, groups=4, size=16, dtype=torch.float32)
    with torch.no_grad():
        inputs["g"][:, ::7] = -5000
        inputs["g"][:, ::3] = -1e-6
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    assert_near(results(form, inputs, index), results("reference", exact, index), 2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_cut_anywhere_and_carried_on_is_whole(form: str) -> None:
    inputs = random_inputs()
    whole, last = run(form, inputs)
    for place in (1, 4, 10):
        first, state = run(form, tokens_of(inputs, slice(place), inputs["state"]))
        second, state = run(form, tokens_of(inputs, slice(place, None), state))
        assert_close(torch.cat([first, second], dim=1), whole)
        assert_close(state, last)


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_bf16_inputs_are_computed_in_fp32(form: str) -> None:
    inputs = random_inputs(length=100, dtype=torch.bfloat16)
    found = results(form, inputs, None)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    assert_near(found, results("reference", exact, None), 2**-8)
    assert {name: found[name].dtype for name in inputs} == {name: t.dtype for name, t in inputs.items()}


@pytest.mark.usefixtures("interpreter")
def test_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 16, own=8, inner=16, outer=16)
    device, index = compute_device(), torch.tensor([5, 27, 11]).cumsum(0)
    documents = torch.bucketize(torch.arange(43), index, right=True).expand(2, -1).to(torch.int32)
    inputs = random_inputs(length=43, dtype=torch.float32)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    here = {name: tensor.detach().to(device).requires_grad_() for name, tensor in inputs.items()}
    assert_near(results("triton", here, documents.to(device)), results("reference", exact, documents), 2e-6)


def test_what_the_triton_kernels_do_not_take() -> None:
    form = decay_scan.named("triton")
    assert form.unsupported_reason(DecayInputs(*random_inputs(dtype=torch.float32).values())) is None
    assert "129 channels" in form.unsupported_reason(
        DecayInputs(*random_inputs(head=129, dtype=torch.float32).values())
    )
