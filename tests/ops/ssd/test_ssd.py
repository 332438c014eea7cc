"""The scan of Mamba-2 against numbers worked out by hand, its own gradients, and itself cut into pieces."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import Package
from hybridtron.ops.dispatch import force
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.ssd import SSDInputs, chunked, mamba_ssm, ssd_scan

OWN_FORMS = ["reference", "chunked", "native"]
FORMS = [*OWN_FORMS, "mamba-ssm"]
TWO_DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
DOCUMENTS = [pytest.param(None, id="stream"), pytest.param(TWO_DOCUMENTS, id="documents")]
PER_TOKEN = ("x", "dt", "B", "C")


@pytest.fixture(autouse=True)
def _stand_in_for_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(mamba_chunk_scan_combined=upstream_scan)
    monkeypatch.setattr(mamba_ssm, "optional_package", lambda name: Package(name, module, "stand-in"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens, so that 11 tokens are two whole chunks and a ragged one."""
    monkeypatch.setattr(chunked, "CHUNK", 4)


def upstream_scan(
    x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, seq_idx, dt_softplus, return_final_states
) -> tuple[Tensor, Tensor]:
    """mamba_ssm's function with its limits: one type of products, fp32 parameters, documents counted from 0."""
    assert dt_softplus
    assert return_final_states
    assert chunk_size & (chunk_size - 1) == 0
    assert x.dtype == B.dtype == C.dtype != torch.float64
    parameters = [A, D, dt_bias, *([] if initial_states is None else [initial_states])]
    assert {t.dtype for t in parameters} == {torch.float32}
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert not seq_idx[:, 0].any(), "the state that comes in belongs to document 0"
    return ssd_scan.reference.function(SSDInputs(x, dt, A, B, C, D, dt_bias, initial_states, seq_idx))


def random_inputs(
    rows: int = 2,
    length: int = 11,
    heads: int = 4,
    head: int = 3,
    groups: int = 2,
    size: int = 5,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor | None]:
    """Arguments by name, in the op's order; parameters and state as in a model, in fp32 or float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "x": torch.randn(rows, length, heads, head, dtype=dtype),
        "dt": torch.randn(rows, length, heads, dtype=dtype),
        "A": -torch.rand(heads, dtype=wide).mul(2).exp(),
        "B": torch.randn(rows, length, groups, size, dtype=dtype),
        "C": torch.randn(rows, length, groups, size, dtype=dtype),
        "D": torch.randn(heads, dtype=wide),
        "dt_bias": torch.randn(heads, dtype=wide) - 1,
        "state": torch.randn(rows, heads, head, size, dtype=wide),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def run(form: str, inputs: dict[str, Tensor | None], documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with force(ssd_scan=form):
        return ssd_scan(SSDInputs(*inputs.values(), documents))


def tokens_of(inputs: dict[str, Tensor | None], tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    return {**inputs, **{name: inputs[name][:, tokens] for name in PER_TOKEN}, "state": state}


def gradients(loss: Tensor, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    wanted = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def some_loss(y: Tensor, state: Tensor) -> Tensor:
    """A loss in which every output and every entry of the final state has its own weight."""
    weights_y = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    weights_state = torch.linspace(2, -1, state.numel(), dtype=state.dtype).view_as(state)
    return (weights_y * y).sum() + (weights_state * state.sin()).sum()


@pytest.mark.parametrize("form", FORMS)
def test_three_steps_by_hand(form: str) -> None:
    one, zero = torch.ones(1, 3, 1, 1), torch.zeros(1)
    # softplus(0) = log 2, and exp(-log 2) = 1/2: the state is halved and gains log 2 at every step
    with force(ssd_scan=form):
        y, state = ssd_scan(SSDInputs(one, 0 * one[..., 0], torch.tensor([-1.0]), one, one, zero, zero))
    assert_close(y.flatten(), math.log(2) * torch.tensor([1, 1.5, 1.75]))
    assert_close(state.flatten(), math.log(2) * torch.tensor([1.75]))


@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_it_is_mamba_1_with_one_decay_for_all_channels_of_a_head(form: str) -> None:
    """Mamba-1's scan, whose reference is tested on its own, with A and dt repeated over a head's channels."""
    inputs = random_inputs(groups=1)
    x, dt, A, B, C, D, dt_bias, state = inputs.values()
    y, last = run(form, inputs, TWO_DOCUMENTS)
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


@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_without_decay_the_state_is_a_running_sum(form: str) -> None:
    inputs = random_inputs() | {"A": torch.zeros(4, dtype=torch.float64)}
    x, dt, _, B, C, D, dt_bias, state = inputs.values()
    B, C = (t.repeat_interleave(2, dim=2) for t in (B, C))
    gains = torch.einsum("blh,blhp,blhn->blhpn", torch.nn.functional.softplus(dt + dt_bias), x, B)
    h = state.unsqueeze(1) + gains.cumsum(1)
    y, last = run(form, inputs)
    assert_close(y, torch.einsum("blhn,blhpn->blhp", C, h) + D[:, None] * x)
    assert_close(last, h[:, -1])


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_slopes(form: str, documents: Tensor | None, heads: int, groups: int) -> None:
    inputs = random_inputs(heads=heads, head=2, size=1, groups=groups)
    if heads == groups:
        inputs["state"] = None
    present = [name for name in inputs if inputs[name] is not None]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(form, inputs | dict(zip(present, tensors, strict=True)), documents)

    # slope by slope for one group, along random directions for several
    assert torch.autograd.gradcheck(outputs, [inputs[name] for name in present], fast_mode=groups > 1)


@pytest.mark.parametrize("documents", [None, [60, 4, 236]], ids=str)
@pytest.mark.parametrize("form", ["chunked", "native", "mamba-ssm"])
def test_fast_forms_equal_the_reference(form: str, documents: list[int] | None) -> None:
    index = None if documents is None else torch.arange(5, 8).repeat_interleave(torch.tensor(documents)).expand(2, -1)
    inputs = random_inputs(length=300, heads=8, head=16, groups=2, size=16, dtype=torch.float32)
    results = {}
    for name in ("reference", form):
        y, state = run(name, inputs, index)
        results[name] = {"y": y, "last": state} | gradients(some_loss(y, state), inputs)
    for name, expected in results["reference"].items():
        assert_close(results[form][name], expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_strong_decays_do_not_blur_the_weak_ones(form: str) -> None:
    """One token in five forgets all; a sum of log decays in fp32 would be off by 1e-4 after some of them."""
    inputs = random_inputs(rows=1, length=256, dtype=torch.float32)
    with torch.no_grad():
        inputs["A"].fill_(-16)
        inputs["dt"].fill_(-8)
        inputs["dt"][:, ::5] = 60
        inputs["dt_bias"].zero_()
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    found, expected = (run(form, arguments) for form, arguments in ((form, inputs), ("reference", exact)))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    grads, exact_grads = gradients(some_loss(*found), inputs), gradients(some_loss(*expected), exact)
    for name, gradient in grads.items():
        assert (gradient.double() - exact_grads[name]).norm() <= 2e-6 * exact_grads[name].norm(), name


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_cut_anywhere_and_carried_on_is_whole(form: str, documents: Tensor | None) -> None:
    inputs = random_inputs()
    whole, last = run(form, inputs, documents)
    expected = gradients(some_loss(whole, last), inputs)
    for cut in range(1, 11):
        if documents is not None and cut in (4, 9):
            continue  # a state that is handed over belongs to the next row's first document: here it would not
        before, after = (None, None) if documents is None else (documents[:, :cut], documents[:, cut:])
        first, state = run(form, tokens_of(inputs, slice(cut), inputs["state"]), before)
        second, state = run(form, tokens_of(inputs, slice(cut, None), state), after)
        assert_close(torch.cat([first, second], dim=1), whole)
        assert_close(state, last)
        assert_close(gradients(some_loss(torch.cat([first, second], dim=1), state), inputs), expected)


@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_a_document_in_mid_row_starts_afresh(form: str) -> None:
    inputs = random_inputs()
    y, last = run(form, inputs, TWO_DOCUMENTS)
    for row, border in enumerate((4, 9)):
        one = {
            name: tensor[row : row + 1] if name in (*PER_TOKEN, "state") else tensor for name, tensor in inputs.items()
        }
        first, _ = run(form, tokens_of(one, slice(border), one["state"]))
        second, state = run(form, tokens_of(one, slice(border, None), None))
        assert_close(y[row], torch.cat([first, second], dim=1)[0])
        assert_close(last[row], state[0])


@pytest.mark.parametrize("border", [70, 128], ids=["inside a chunk", "between chunks"])
@pytest.mark.parametrize("form", OWN_FORMS)
def test_no_bit_of_a_document_leaks_into_the_next(form: str, border: int) -> None:
    length = 300
    documents = (torch.arange(length) >= border).int().expand(2, -1)
    inputs = random_inputs(length=length, head=8, dtype=torch.float32)
    probed = []
    for factor in (1.0, -30.0):
        changed = {
            name: torch.cat([factor * inputs[name][:, :border], inputs[name][:, border:]], dim=1)
            .detach()
            .requires_grad_()
            for name in PER_TOKEN
        }
        changed = inputs | changed | {"state": (factor * inputs["state"]).detach().requires_grad_()}
        y, last = run(form, changed, documents)
        grads = gradients(some_loss(y[:, border:], last), changed)
        assert not grads["state"].any()
        assert not any(grads[name][:, :border].any() for name in PER_TOKEN)
        probed.append([y[:, border:], last, *grads.values()])
    assert all(torch.equal(one, other) for one, other in zip(*probed, strict=True))


@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_an_infinite_state_stays_in_its_document(form: str) -> None:
    inputs = random_inputs()
    fresh = run(form, inputs, TWO_DOCUMENTS)
    infinite = inputs | {"state": torch.full_like(inputs["state"], torch.inf).requires_grad_()}
    y, last = run(form, infinite, TWO_DOCUMENTS)
    for row, border in enumerate((4, 9)):
        assert torch.equal(y[row, border:], fresh[0][row, border:])
    assert torch.equal(last, fresh[1])


@pytest.mark.parametrize("form", FORMS)
def test_one_token_is_one_step(form: str) -> None:
    inputs = random_inputs(length=1, dtype=torch.float32)
    x, dt, A, B, C, D, dt_bias, state = inputs.values()
    delta = torch.nn.functional.softplus(dt + dt_bias)[:, 0, :, None, None]
    B, C = (t[:, 0].repeat_interleave(2, dim=1) for t in (B, C))
    h = torch.exp(delta * A[:, None, None]) * state + delta * x[:, 0].unsqueeze(3) * B.unsqueeze(2)
    y, last = run(form, inputs)
    assert_close(last, h)
    assert_close(y[:, 0], (h * C.unsqueeze(2)).sum(-1) + D[:, None] * x[:, 0])


@pytest.mark.parametrize("form", FORMS)
def test_bf16_inputs_are_computed_in_fp32(form: str) -> None:
    inputs = random_inputs(length=100, dtype=torch.bfloat16)
    y, last = run(form, inputs)
    exact_y, exact_last = run("reference", {name: tensor.double() for name, tensor in inputs.items()})
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    assert_close(last.double(), exact_last, rtol=1e-5, atol=1e-5)
    assert_close(y.double(), exact_y, rtol=2**-7, atol=2**-7)
    grads = gradients(some_loss(y, last), inputs)
    assert {name: grad.dtype for name, grad in grads.items()} == {name: t.dtype for name, t in inputs.items()}


def test_autocast_does_not_lower_the_precision() -> None:
    inputs = random_inputs(length=100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run("chunked", inputs)
    assert torch.equal(y, run("chunked", inputs)[0])


def test_backward_keeps_no_state_of_every_token() -> None:
    rows, length, heads, head, size = 2, 512, 4, 8, 16
    inputs = random_inputs(rows, length, heads, head, 1, size, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run("chunked", inputs)
    own = {t.data_ptr() for t in inputs.values()}
    beyond_inputs = sum(t.numel() for address, t in kept.items() if address not in own)
    assert 0 < beyond_inputs <= rows * length * heads * head * size / chunked.CHUNK


def test_what_mamba_ssm_does_not_support() -> None:
    form = ssd_scan.named("mamba-ssm")
    assert form.device == "cuda"
    assert form.unsupported_reason(SSDInputs(*random_inputs(dtype=torch.float32).values(), TWO_DOCUMENTS)) is None
    assert "float64" in form.unsupported_reason(SSDInputs(*random_inputs().values()))


def test_types_that_differ_are_made_one_for_mamba_ssm() -> None:
    inputs = random_inputs(dtype=torch.bfloat16)
    mixed = inputs | {"x": inputs["x"].float()}
    assert_close(run("mamba-ssm", mixed), run("reference", mixed), rtol=2**-7, atol=1e-3)
