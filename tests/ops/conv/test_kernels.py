"""The Triton convolution against the reference in float64, forward and backward, and as a GPU would get it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.dispatch import force
from tests.ops.compiling import compile_calls
from tests.ops.conv.test_conv import gradients, random_inputs

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 tokens and 4 channels: two of them, the second ragged, make a row. Two tiles are summed at a time."""
    from hybridtron.ops.conv import kernels as kernel

    monkeypatch.setattr(kernel, "TOKENS", 8)
    monkeypatch.setattr(kernel, "CHANNELS", 4)
    monkeypatch.setattr(kernel, "WALK_TOKENS", 8)
    monkeypatch.setattr(kernel, "WALK_CHANNELS", 4)
    monkeypatch.setattr(kernel, "SUM_TILES", 2)
    monkeypatch.setattr(kernel, "SUM_CHANNELS", 4)


def documents_with_borders(rows: int, length: int, *borders: int) -> Tensor:
    """Every row begins a document at each border; a second row begins them a token later."""
    starts = torch.zeros(rows, length, dtype=torch.int32)
    for row in range(rows):
        starts[row, [min(border + row, length - 1) for border in borders]] = 1
    return starts.cumsum(1).int()


def computed(form: str, inputs: dict[str, Tensor | None], documents: Tensor | None, silu: bool) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    conv = ConvInputs(*inputs.values(), documents, silu)
    with force(causal_conv=form):
        y = causal_conv(conv)
    tail = next_tail(conv)
    return {"y": y, "new tail": tail} | gradients(some_loss(y, tail), inputs)


def some_loss(y: Tensor, tail: Tensor) -> Tensor:
    """Return a loss in which every output has its own weight, exact in bf16."""
    parts = [(torch.arange(t.numel(), device=t.device) % 61 - 23).to(t.dtype).view_as(t) * t for t in (y, tail)]
    return (parts[0] / 16).sum() + (parts[1] / 16).sum()


def cases() -> Iterator[object]:
    everything = {"rows": 1, "length": 11, "channels": 3, "width": 3, "absent": (), "borders": (4, 8), "silu": True}
    for name, changed in {
        "everything": {},
        "two rows, two blocks of channels": {"rows": 2, "channels": 5, "length": 7, "borders": (3,)},
        "one document": {"borders": None},
        "no tail": {"absent": ("tail",)},
        "no bias, no silu": {"absent": ("bias",), "silu": False},
        "bare": {"absent": ("bias", "tail"), "borders": None},
        "border at the second token": {"borders": (1,)},
        "border in the tail's reach": {"borders": (1, 2, 3)},
        "one token": {"length": 1, "borders": None},
        "shorter than a tile and than the tail": {"length": 2, "borders": (1,)},
        "width 2": {"width": 2},
        "width 8": {"width": 8, "length": 9, "silu": False},
    }.items():
        yield pytest.param(everything | changed, id=name)


@pytest.mark.parametrize("case", [*cases()])
@pytest.mark.usefixtures("_small_tiles")
def test_triton_convolution_equals_the_reference(case: dict, everywhere: torch.device) -> None:
    sizes = {name: case[name] for name in ("rows", "length", "channels", "width")}
    inputs = random_inputs(dtype=torch.float32, **sizes) | dict.fromkeys(case["absent"])
    exact = {name: None if t is None else t.detach().double().requires_grad_() for name, t in inputs.items()}
    here = {name: None if t is None else t.detach().to(everywhere).requires_grad_() for name, t in inputs.items()}
    documents = documents_here = None
    if case["borders"] is not None:
        documents = documents_with_borders(case["rows"], case["length"], *case["borders"])
        documents_here = documents.to(everywhere)
    expected = computed("reference", exact, documents, case["silu"])
    actual = computed("triton", here, documents_here, case["silu"])
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        close = 2e-6 * max(1.0, value.abs().max().item())
        assert_close(actual[name].double().cpu(), value, rtol=1e-5, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("_small_tiles")
def test_bf16_convolution_sums_in_fp32_and_repeats_bit_for_bit(everywhere: torch.device) -> None:
    inputs = random_inputs(channels=3, rows=1, width=3, dtype=torch.bfloat16)
    here = {name: t.detach().to(everywhere).requires_grad_() for name, t in inputs.items()}
    documents = documents_with_borders(1, 11, 5)
    first, again = (computed("triton", here, documents.to(everywhere), True) for _ in range(2))
    expected = computed("reference", {name: t.detach().double().requires_grad_() for name, t in inputs.items()},
                        documents, True)  # fmt: skip
    for name, value in expected.items():
        assert first[name].dtype == torch.bfloat16
        assert torch.equal(first[name], again[name])
        assert_close(first[name].double().cpu(), value, rtol=2**-7, atol=2**-6)


@pytest.mark.usefixtures("_small_tiles")
def test_triton_convolution_accepts_any_memory_layout(everywhere: torch.device) -> None:
    """Use a mixer's layouts: sequence first in memory, a part of a wider projection, and channels apart."""
    inputs = random_inputs(channels=3, length=5, width=2, dtype=torch.float32)
    views = {
        "part of something wider, sequence first": torch.randn(5, 2, 6)[:, :, 3:],
        "channels apart": torch.randn(3, 2, 5).permute(2, 1, 0),
    }
    for name, x in views.items():
        here = {key: t.detach().to(everywhere).requires_grad_() for key, t in inputs.items()}
        here["x"] = x.transpose(0, 1).to(everywhere).requires_grad_()
        expected = computed("reference", here, None, True)
        for key, value in computed("triton", here, None, True).items():
            assert_close(value, expected[key], rtol=1e-5, atol=1e-5, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}")


@pytest.mark.usefixtures("_small_tiles")
def test_triton_convolution_writes_the_memory_order_that_is_asked_for(everywhere: torch.device) -> None:
    """The output is row-major or keeps x's order; the gradient of x keeps x's order in either case."""
    inputs = random_inputs(channels=3, length=5, width=2, dtype=torch.float32)
    here = {key: t.detach().to(everywhere).requires_grad_() for key, t in inputs.items()}
    token_major = here["x"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    conv = ConvInputs(token_major, *list(here.values())[1:], None, True)
    with force(causal_conv="triton"):
        kept = causal_conv(conv)
        rows = causal_conv(conv._replace(row_major=True))
    assert torch.equal(kept, rows)
    assert kept.transpose(0, 1).is_contiguous()
    assert rows.is_contiguous()
    for y in (kept, rows):
        (grad,) = torch.autograd.grad(y, token_major, torch.ones_like(y))
        assert grad.transpose(0, 1).is_contiguous()


def test_triton_convolution_refuses_unsupported_inputs() -> None:
    form = causal_conv.named("triton")
    assert form.device == "cuda"
    assert form.repeats_bits()
    inputs = random_inputs(dtype=torch.float32)
    assert form.unsupported_reason(ConvInputs(*inputs.values(), documents_with_borders(2, 11, 5), True)) is None
    assert "float64" in form.unsupported_reason(ConvInputs(*random_inputs().values()))
    for width in (1, 9):
        inputs = random_inputs(width=width, dtype=torch.float32)
        assert f"{width}" in form.unsupported_reason(ConvInputs(*inputs.values()))


def test_documents_with_a_tail_select_triton_before_causal_conv1d() -> None:
    assert [form.name for form in causal_conv.implementations] == ["causal-conv1d", "triton", "native"]
    inputs = ConvInputs(*random_inputs(dtype=torch.float32).values(), documents_with_borders(2, 11, 5), True)
    supporting = [form.name for form in causal_conv.implementations if form.unsupported_reason(inputs) is None]
    assert supporting[0] == "triton"


def shipped() -> None:
    """64k tokens in one row, as they lie in a Samba 1.3B, with all that the kernels can do, and with as little."""
    for width, dtype, whole in ((4, torch.bfloat16, True), (4, torch.float32, False), (8, torch.bfloat16, True)):
        length = 65536
        channels = 4608
        parameter = torch.empty(channels, dtype=dtype, device="meta").requires_grad_()
        inputs = ConvInputs(
            torch.empty(length, 1, 2 * channels, dtype=dtype, device="meta")[:, :, :channels].transpose(0, 1),
            torch.empty(channels, width, dtype=dtype, device="meta").requires_grad_(),
            parameter if whole else None,
            torch.empty(1, width - 1, channels, dtype=dtype, device="meta").requires_grad_() if whole else None,
            torch.empty(1, length, dtype=torch.int32, device="meta") if whole else None,
            whole,
        )
        y = causal_conv.named("triton").function(inputs)
        y.sum().backward()


@pytest.mark.slow  # three widths and types of two kernels
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_forward", "_backward", "_parameter_gradients"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.instructions["atom"] == launch.instructions["red"] == 0 for launch in launches)
    assert max(buffers) == 2 * 65536 * 4608  # the projection that x is a part of
