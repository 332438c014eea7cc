"""The selective scan against numbers worked out by hand, its own gradients, and itself cut into pieces."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import Package
from hybridtron.ops import dispatch
from hybridtron.ops.dispatch import force
from hybridtron.ops.scan import ScanInputs, chunked, mamba_ssm, recurrence, selective_scan

OWN_FORMS = ["reference", "chunked", "native"]
FORMS = [*OWN_FORMS, "mamba-ssm"]
TWO_DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
FORMS_AND_DOCUMENTS = [  # mamba-ssm refuses documents, and a state before the row
    *(pytest.param(form, None, id=f"{form}-stream") for form in FORMS),
    *(pytest.param(form, TWO_DOCUMENTS, id=f"{form}-documents") for form in OWN_FORMS),
]
PER_TOKEN = ("x", "dt", "B", "C", "z")


@pytest.fixture(autouse=True)
def _stand_in_for_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(selective_scan_fn=upstream_scan)
    monkeypatch.setattr(mamba_ssm, "optional_package", lambda name: Package(name, module, "stand-in"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens, so that 11 tokens are two whole chunks of groups and a ragged one that goes one by one."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    monkeypatch.setattr(recurrence, "GROUP", 2)


def upstream_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state) -> tuple[Tensor, Tensor]:
    """mamba_ssm's selective_scan_fn with its limits: one type, from zero, a last state without a gradient."""
    assert delta_softplus
    assert return_last_state
    assert {t.dtype for t in (delta, B, C)} == {u.dtype}
    assert z is None or z.dtype == u.dtype
    gate = None if z is None else z.mT
    y, last = selective_scan.reference.function(ScanInputs(u.mT, delta.mT, A, B.mT, C.mT, D, delta_bias, gate))
    return y.mT, last.detach()


def random_inputs(
    rows: int = 2, length: int = 11, channels: int = 3, size: int = 2, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor | None]:
    """Arguments by name, in the op's order; parameters and state as in a model, in fp32 or float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "x": torch.randn(rows, length, channels, dtype=dtype),
        "dt": torch.randn(rows, length, channels, dtype=dtype),
        "A": -torch.rand(channels, size, dtype=wide).mul(2).exp(),
        "B": torch.randn(rows, length, size, dtype=dtype),
        "C": torch.randn(rows, length, size, dtype=dtype),
        "D": torch.randn(channels, dtype=wide),
        "dt_bias": torch.randn(channels, dtype=wide) - 1,
        "z": torch.randn(rows, length, channels, dtype=dtype),
        "state": torch.randn(rows, channels, size, dtype=wide),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def inputs_for(form: str, rows: int = 2, length: int = 11, channels: int = 3, **options) -> dict[str, Tensor | None]:
    """The same, with a state before the row where the implementation takes one."""
    inputs = random_inputs(rows, length, channels, **options)
    return inputs | {"state": None} if form == "mamba-ssm" else inputs


def run(form: str, inputs: dict[str, Tensor | None], documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with force(selective_scan=form):
        return selective_scan(ScanInputs(*inputs.values(), documents))


def tokens_of(inputs: dict[str, Tensor | None], tokens: slice, state: Tensor | None) -> dict[str, Tensor | None]:
    cut = {name: inputs[name][:, tokens] for name in PER_TOKEN}
    return {**inputs, **cut, "state": state}


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
    one = torch.ones(1, 3, 1)
    zero = torch.zeros(1)
    # softplus(0) = log 2, and exp(-log 2) = 1/2: the state is halved and gains log 2 at every step
    y, state = selective_scan_of_ones(form, one, zero)
    assert_close(y.flatten(), math.log(2) * torch.tensor([1, 1.5, 1.75]))
    assert_close(state.flatten(), math.log(2) * torch.tensor([1.75]))


def selective_scan_of_ones(form: str, one: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    with force(selective_scan=form):
        return selective_scan(ScanInputs(one, 0 * one, torch.tensor([[-1.0]]), one, one, zero, zero))


@pytest.fixture(params=[recurrence.LARGE_STATE, 0], ids=["side_by_side", "one_by_one"])
def one_by_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "LARGE_STATE", request.param)


@pytest.mark.usefixtures("small_chunks", "one_by_one")
@pytest.mark.parametrize("form", OWN_FORMS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("begins", [1, 2, 4, 7, 9])  # chunks begin at 4 and 8
def test_nothing_crosses_the_border_of_a_document(form: str, value: float, begins: int) -> None:
    """Neither a state that is not finite, forward, nor such a gradient, backward."""
    documents = (torch.arange(11) >= begins).int().expand(2, -1)
    sound = random_inputs()
    broken = {name: tensor.detach().clone().requires_grad_() for name, tensor in sound.items()}
    for name in ("state", "x", "dt", "B"):
        with torch.no_grad():
            (broken[name] if name == "state" else broken[name][:, :begins])[0] = value
    made = []
    for inputs in (sound, broken):
        y, last = run(form, inputs, documents)
        (y[:, begins:].square().sum() + last.sum()).backward()
        made.append((y[:, begins:], last, *(inputs[name].grad[:, begins:] for name in PER_TOKEN)))
    assert all(map(torch.equal, *made))

    y, last = run(form, sound, documents)
    grads = torch.autograd.grad([y, last], [sound[name] for name in PER_TOKEN], [y.detach(), last * value])
    y, last = run(form, sound, documents)
    expected = torch.autograd.grad([y, last], [sound[name] for name in PER_TOKEN], [y.detach(), 0 * last])
    assert all(torch.equal(ours[:, :begins], theirs[:, :begins]) for ours, theirs in zip(grads, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_without_decay_the_state_is_a_running_sum(form: str) -> None:
    inputs = inputs_for(form) | {"A": torch.zeros(3, 2, dtype=torch.float64)}
    x, dt, _, B, C, D, dt_bias, z, state = inputs.values()
    gains = torch.einsum("ble,ble,bln->blen", torch.nn.functional.softplus(dt + dt_bias), x, B)
    h = gains.cumsum(1) if state is None else state.unsqueeze(1) + gains.cumsum(1)
    y, last = run(form, inputs)
    assert_close(y, (torch.einsum("bln,blen->ble", C, h) + D * x) * z * torch.sigmoid(z))
    assert_close(last, h[:, -1])


@pytest.mark.parametrize("absent", [(), ("z", "state")], ids=["all", "bare"])
@pytest.mark.parametrize(("form", "documents"), FORMS_AND_DOCUMENTS)
@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_slopes(form: str, absent: tuple[str, ...], documents: Tensor | None) -> None:
    inputs = inputs_for(form, channels=2) | dict.fromkeys(absent)
    present = [name for name in inputs if inputs[name] is not None]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(form, inputs | dict(zip(present, tensors, strict=True)), documents)

    assert torch.autograd.gradcheck(outputs, [inputs[name] for name in present])


@pytest.mark.parametrize(
    ("form", "documents"),
    [*((form, lengths) for form in ("chunked", "native") for lengths in (None, [60, 4, 86])), ("mamba-ssm", None)],
    ids=str,
)
def test_fast_forms_equal_the_reference(form: str, documents: list[int] | None) -> None:
    index = None if documents is None else torch.arange(3).repeat_interleave(torch.tensor(documents)).expand(2, -1)
    inputs = inputs_for(form, length=150, channels=24, size=4, dtype=torch.float32)
    results = {}
    for name in ("reference", form):
        y, state = run(name, inputs, index)
        results[name] = {"y": y, "last": state} | gradients(some_loss(y, state), inputs)
    for name, expected in results["reference"].items():
        assert_close(results[form][name], expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize(("form", "documents"), FORMS_AND_DOCUMENTS)
@pytest.mark.usefixtures("small_chunks")
def test_cut_anywhere_and_carried_on_is_whole(form: str, documents: Tensor | None) -> None:
    inputs = inputs_for(form)
    whole, last = run(form, inputs, documents)
    expected = gradients(some_loss(whole, last), inputs)
    for cut in range(1, 11):
        if documents is not None and cut in (4, 9):
            continue  # a state that is handed over belongs to the next row's first document: here it would not
        before, after = (None, None) if documents is None else (documents[:, :cut], documents[:, cut:])
        first, state = run(form, tokens_of(inputs, slice(cut), inputs["state"]), before)
        second, state = run(
            "chunked" if form == "mamba-ssm" else form, tokens_of(inputs, slice(cut, None), state), after
        )
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


@pytest.mark.parametrize("form", OWN_FORMS)
def test_no_bit_of_a_document_leaks_into_the_next(form: str) -> None:
    border, length = 70, 150  # inside the second chunk
    documents = (torch.arange(length) >= border).int().expand(2, -1)
    inputs = random_inputs(length=length, channels=8, size=4, dtype=torch.float32)
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


@pytest.mark.parametrize("form", FORMS)
def test_one_token_is_one_step(form: str) -> None:
    inputs = inputs_for(form, length=1)
    x, dt, A, B, C, D, dt_bias, z, state = inputs.values()
    delta = torch.nn.functional.softplus(dt + dt_bias).mT
    h = delta * x.mT * B + (0 if state is None else torch.exp(delta * A) * state)
    y, last = run(form, inputs)
    assert_close(last, h)
    assert_close(y, ((h @ C.mT).mT + D * x) * z * torch.sigmoid(z))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_inputs_are_computed_in_fp32(form: str) -> None:
    inputs = inputs_for(form, length=100, dtype=torch.bfloat16)
    y, last = run(form, inputs)
    doubled = {name: None if tensor is None else tensor.double() for name, tensor in inputs.items()}
    exact_y, exact_last = run("reference", doubled)
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    assert_close(last.double(), exact_last, rtol=1e-5, atol=1e-5)
    assert_close(y.double(), exact_y, rtol=2**-7, atol=2**-7)
    grads = gradients(some_loss(y, last), inputs)
    assert all(grad.dtype == inputs[name].dtype for name, grad in grads.items())


def test_autocast_does_not_lower_the_precision() -> None:
    inputs = random_inputs(length=100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run("chunked", inputs)
    assert torch.equal(y, run("chunked", inputs)[0])


def test_backward_keeps_no_state_of_every_token() -> None:
    rows, length, channels, size = 2, 256, 8, 16
    inputs = random_inputs(rows, length, channels, size, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run("chunked", inputs)
    own = {t.data_ptr() for t in inputs.values()}
    beyond_inputs = sum(t.numel() for address, t in kept.items() if address not in own)
    assert 0 < beyond_inputs <= rows * length * channels * size / chunked.CHUNK + channels * size


def test_what_mamba_ssm_does_not_support() -> None:
    def reason(inputs: dict[str, Tensor | None], documents: Tensor | None = None) -> str | None:
        return selective_scan.named("mamba-ssm").unsupported_reason(ScanInputs(*inputs.values(), documents))

    assert selective_scan.named("mamba-ssm").device == "cuda"
    inputs = inputs_for("mamba-ssm", dtype=torch.float32)
    assert reason(inputs) is None
    assert "document borders" in reason(inputs, TWO_DOCUMENTS)
    assert "float64" in reason(inputs_for("mamba-ssm"))
    assert "at most 256, not 257" in reason(inputs_for("mamba-ssm", size=257, dtype=torch.float32))
    assert "no initial state" in reason(random_inputs(dtype=torch.float32))


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
    inputs = random_inputs(dtype=torch.float32) | ({} if with_state else {"state": None})
    monkeypatch.setattr(dispatch, "device_of", lambda inputs: "cuda")
    assert selective_scan.selected(ScanInputs(*inputs.values())).name == runs


def test_types_that_differ_are_made_one_for_mamba_ssm() -> None:
    inputs = inputs_for("mamba-ssm", dtype=torch.bfloat16)
    mixed = inputs | {"dt": inputs["dt"].float()}
    assert_close(run("mamba-ssm", mixed), run("reference", mixed), rtol=2**-7, atol=1e-3)
