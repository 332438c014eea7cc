"""The causal convolution against torch's own, its gradients, and itself cut into pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.device import Package
from hybridtron.ops.conv import ConvInputs, causal_conv, causal_conv1d, next_tail
from hybridtron.ops.dispatch import force

OWN_FORMS = ["reference", "native"]
FORMS = [*OWN_FORMS, "causal-conv1d"]
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]])


@pytest.fixture(autouse=True)
def _stand_in_for_causal_conv1d(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(causal_conv1d_fn=upstream_conv)
    monkeypatch.setattr(causal_conv1d, "optional_package", lambda name: Package(name, module, "stand-in"))


def upstream_conv(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None) -> Tensor:
    """causal_conv1d's causal_conv1d_fn with its limits on layouts and types."""
    assert seq_idx is None or initial_states is None
    assert x.stride(1) == 1
    assert x.stride(2) % 8 == 0
    assert initial_states is None or (initial_states.stride(1) == 1 and initial_states.dtype == x.dtype)
    assert bias is None or bias.dtype == weight.dtype
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    tail = None if initial_states is None else initial_states.mT
    return causal_conv.reference.function(ConvInputs(x.mT, weight, bias, tail, seq_idx, activation == "silu")).mT


def random_inputs(
    rows: int = 2, length: int = 11, channels: int = 8, width: int = 4, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor | None]:
    """The op's tensors by name, in its order."""
    shapes = {
        "x": (rows, length, channels),
        "weight": (channels, width),
        "bias": (channels,),
        "tail": (rows, width - 1, channels),
    }
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def run(
    form: str, inputs: dict[str, Tensor | None], documents: Tensor | None = None, activation: bool = True
) -> tuple[Tensor, Tensor]:
    """y, and the tail for the next row."""
    conv = ConvInputs(*inputs.values(), documents, activation)
    with force(causal_conv=form):
        return causal_conv(conv), next_tail(conv)


def gradients(loss: Tensor, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    wanted = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def some_loss(y: Tensor, tail: Tensor) -> Tensor:
    """A loss in which every output and every entry of the tail has its own weight."""
    weights_y = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    weights_tail = torch.linspace(2, -1, tail.numel(), dtype=tail.dtype).view_as(tail)
    return (weights_y * y).sum() + (weights_tail * tail.sin()).sum()


@pytest.mark.parametrize("form", FORMS)
def test_convolution_of_two_taps_equals_hand_computed_values(form: str) -> None:
    channel = torch.arange(1.0, 9.0)  # channel c reads c, 2c, 3c
    x = torch.tensor([1.0, 2.0, 3.0])[None, :, None] * channel
    weight = torch.tensor([10.0, 1.0]).expand(8, 2)
    y, tail = run(form, {"x": x, "weight": weight, "bias": torch.ones(8), "tail": -x[:, :1]}, activation=False)
    assert_close(y[0], torch.tensor([-9.0, 12.0, 23.0])[:, None] * channel + 1)
    assert_close(tail, x[:, 2:])


@pytest.mark.parametrize("activation", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_convolution_equals_torch_conv1d(form: str, width: int, activation: bool) -> None:
    inputs = random_inputs(width=width)
    x, weight, bias, tail = inputs.values()
    expected = F.conv1d(torch.cat([tail, x], dim=1).mT, weight.unsqueeze(1), bias, groups=8).mT
    if activation:
        expected = F.silu(expected)
    y, new_tail = run(form, inputs, None, activation)
    assert_close(y, expected)
    assert_close(new_tail, x[:, 1 - width :])
    assert_close(gradients(y.square().sum(), inputs), gradients(expected.square().sum(), inputs))


@pytest.mark.parametrize("activation", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("absent", [("bias", "tail"), ("tail",), ()], ids=["bare", "bias", "all"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["stream", "documents"])
@pytest.mark.parametrize("form", OWN_FORMS)
def test_gradients_are_the_slopes(
    form: str, documents: Tensor | None, absent: tuple[str, ...], activation: bool
) -> None:
    inputs = random_inputs(channels=2) | dict.fromkeys(absent)
    present = [name for name in inputs if inputs[name] is not None]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(form, inputs | dict(zip(present, tensors, strict=True)), documents, activation)

    assert torch.autograd.gradcheck(outputs, [inputs[name] for name in present], fast_mode=True)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["stream", "documents"])
@pytest.mark.parametrize("form", FORMS[1:])
def test_fast_forms_equal_the_reference(form: str, documents: Tensor | None) -> None:
    inputs = random_inputs(length=600, channels=16, dtype=torch.float32)
    if documents is not None:
        inputs["tail"] = None
        documents = documents.repeat_interleave(55, dim=1)[:, :600]
    results = {}
    for name in ("reference", form):
        y, tail = run(name, inputs, documents)
        results[name] = {"y": y, "tail": tail} | gradients(some_loss(y, tail), inputs)
    for name, expected in results["reference"].items():
        assert_close(results[form][name], expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
def test_pieces_with_a_carried_tail_equal_the_whole_row(form: str) -> None:
    inputs = random_inputs()
    whole, last = run(form, inputs)
    expected = gradients(some_loss(whole, last), inputs)
    for cut in range(1, 11):  # rows shorter than the tail among them
        first, tail = run(form, inputs | {"x": inputs["x"][:, :cut]})
        second, tail = run(form, inputs | {"x": inputs["x"][:, cut:], "tail": tail})
        assert_close(torch.cat([first, second], dim=1), whole)
        assert_close(tail, last)
        assert_close(gradients(some_loss(torch.cat([first, second], dim=1), tail), inputs), expected)


@pytest.mark.parametrize("form", OWN_FORMS)
def test_document_in_mid_row_starts_without_a_tail(form: str) -> None:
    inputs = random_inputs(rows=1)
    y, last = run(form, inputs, DOCUMENTS[:1])
    parts = []
    tail = inputs["tail"]
    for tokens in (slice(4), slice(4, 6), slice(6, None)):
        part, new_tail = run(form, inputs | {"x": inputs["x"][:, tokens], "tail": tail})
        parts.append(part)
        tail = None
    assert_close(y, torch.cat(parts, dim=1))
    assert_close(last, new_tail)


@pytest.mark.parametrize("form", OWN_FORMS)
def test_tail_holds_the_last_document_alone(form: str) -> None:
    inputs = random_inputs()
    _, tail = run(form, inputs, DOCUMENTS)
    assert_close(tail[0], inputs["x"][0, -3:])
    assert_close(tail[1, 1:], inputs["x"][1, -2:])
    assert not tail[1, 0].any()
    _, tail = run(form, inputs | {"x": inputs["x"][:, :2]}, torch.tensor([[0, 0], [0, 1]]))
    assert_close(tail[0], torch.cat([inputs["tail"][0, -1:], inputs["x"][0, :2]]))
    assert not tail[1, :2].any()


@pytest.mark.parametrize("form", OWN_FORMS)
def test_documents_leak_no_bit_into_the_next(form: str) -> None:
    # just inside the second chunk
    border = 258
    length = 300
    documents = (torch.arange(length) >= border).int().expand(2, -1)
    inputs = random_inputs(length=length, dtype=torch.float32)
    probed = []
    for factor in (1.0, -30.0):
        x = torch.cat([factor * inputs["x"][:, :border], inputs["x"][:, border:]], dim=1).detach().requires_grad_()
        changed = inputs | {"x": x, "tail": (factor * inputs["tail"]).detach().requires_grad_()}
        y, tail = run(form, changed, documents)
        grads = gradients(some_loss(y[:, border:], tail), changed)
        assert not grads["tail"].any()
        assert not grads["x"][:, :border].any()
        probed.append([y[:, border:], tail, *grads.values()])
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_inputs_are_summed_in_fp32(form: str) -> None:
    inputs = random_inputs(length=40, dtype=torch.bfloat16)
    y, tail = run(form, inputs)
    exact, _ = run("reference", {name: tensor.double() for name, tensor in inputs.items()})
    assert y.dtype == tail.dtype == torch.bfloat16
    assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)
    assert all(grad.dtype == torch.bfloat16 for grad in gradients(some_loss(y, tail), inputs).values())


def test_causal_conv1d_refuses_unsupported_inputs() -> None:
    form = causal_conv.named("causal-conv1d")
    assert form.device == "cuda"

    def reason(documents: Tensor | None = None, absent: tuple[str, ...] = (), **sizes: int) -> str | None:
        inputs = random_inputs(dtype=torch.float32, **sizes) | dict.fromkeys(absent)
        return form.unsupported_reason(ConvInputs(*inputs.values(), documents, True))

    assert reason() is None
    assert reason(DOCUMENTS, absent=("tail",)) is None
    assert "tail" in reason(DOCUMENTS)
    assert "widths" in reason(width=5)
    assert "channels" in reason(channels=12)
