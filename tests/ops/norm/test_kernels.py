"""The norm's Triton kernels against the reference in float64, alone and after a sum: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.norm.triton import MAX_CHANNELS
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")

FP32 = 5e-7  # of a tensor's norm


@pytest.fixture
def four_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run four programs, each with one row of more than 16 channels at a time, or with several shorter rows."""
    from hybridtron.ops.norm import kernels  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels, "programs_at_once", lambda *_: 4)
    monkeypatch.setattr(kernels, "TILE", 32)


def results(form: str, x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> list[Tensor]:
    """Return y, and the gradients of x and the weight."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    with force(rms_norm=form):
        y = rms_norm(RMSNormInputs(x, weight, eps))
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))]


def assert_right(x: Tensor, weight: Tensor, dy: Tensor, tolerance: float, eps: float = 1e-5) -> list[Tensor]:
    device = compute_device()
    expected = results("reference", x.double(), weight.double(), dy.double(), eps)
    actual = results("triton", x.to(device), weight.to(device), dy.to(device), eps)
    assert [t.dtype for t in actual] == [x.dtype, x.dtype, weight.dtype]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()
    return actual


@pytest.mark.parametrize("shape", [(1, 3), (7, 16), (3, 5, 100), (2, 1, 1025), (1, 2304)], ids=str)
def test_triton_norm_equals_the_reference_at_any_size(shape: tuple[int, ...]) -> None:
    assert_right(torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape), FP32, eps=0.1)


@pytest.mark.parametrize("channels", [7, 8, 24])
@pytest.mark.parametrize("rows", [3, 12, 37])
@pytest.mark.usefixtures("four_programs")
def test_triton_norm_accepts_fewer_and_more_rows_than_programs(rows: int, channels: int) -> None:
    assert_right(torch.randn(rows, channels), torch.randn(channels), torch.randn(rows, channels), FP32)


def test_triton_norm_of_small_rows_includes_eps() -> None:
    assert_right(1e-3 * torch.randn(4, 40), torch.randn(40), torch.randn(4, 40), FP32, eps=1e-6)


def test_triton_norm_accepts_rows_that_are_not_contiguous() -> None:
    x = torch.randn(40, 6).T
    dy = torch.randn(1, 40).expand(6, 40)
    assert_right(x, torch.randn(40), dy, FP32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_norm_sums_half_precision_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 100, dtype=dtype)
    dy = torch.randn(3, 5, 100, dtype=dtype)
    with_fp32_weight = assert_right(x, torch.randn(100), dy, 2**-7)
    with_narrow_weight = assert_right(x, torch.randn(100, dtype=dtype), dy, 2**-7)
    assert with_fp32_weight[0].dtype == with_narrow_weight[0].dtype == dtype


@pytest.mark.usefixtures("four_programs")
def test_repeated_calls_give_equal_bits() -> None:
    x = torch.randn(11, 24)
    weight = torch.randn(24)
    dy = torch.randn(11, 24)
    for first, second in zip(assert_right(x, weight, dy, FP32), assert_right(x, weight, dy, FP32), strict=True):
        assert torch.equal(first, second)


def sum_results(
    dtype: torch.dtype, shape: tuple[int, ...], stream: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sum, the norm and all gradients, and the expected ones, in float64 from the computed sum on.

    Neither the second summand nor the gradients are contiguous. With a stream of its own type the weight is of `dtype`.
    """
    device = compute_device()
    weight_dtype = torch.float32
    if stream:
        weight_dtype = dtype
    x = torch.randn(shape, dtype=stream or dtype)
    added = torch.randn(shape[::-1], dtype=dtype).T
    weight = torch.randn(shape[-1], dtype=weight_dtype)
    dsum, dy = (torch.randn(shape[-1], dtype=kind).expand(shape) for kind in (x.dtype, dtype))
    ours = [tensor.to(device).requires_grad_() for tensor in (x, added, weight)]
    outputs = add_rms_norm(AddRMSNormInputs(ours[0], ours[1], ours[2], 1e-5))
    actual = [*outputs, *torch.autograd.grad(outputs, ours, (dsum.to(device), dy.to(device)))]
    summed, wide = (tensor.detach().cpu().double().requires_grad_() for tensor in (outputs[0], weight))
    y = rms_norm.reference.function(RMSNormInputs(summed, wide, 1e-5))
    grad_sum, grad_weight = torch.autograd.grad((summed, y), (summed, wide), (dsum.double(), dy.double()))
    expected = [x.double() + added.double(), y, grad_sum, grad_sum, grad_weight]
    return [tensor.detach().cpu() for tensor in actual], expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, 2**-7), (torch.float16, 2**-11)]
)
@pytest.mark.usefixtures("four_programs")
def test_triton_norm_of_a_sum_equals_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    with force(add_rms_norm="triton"):
        actual, expected = sum_results(dtype, (7, 100))
    assert [t.dtype for t in actual] == [dtype] * 4 + [torch.float32]
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    if dtype != torch.float32:  # rounded once: what is normed is the sum as it is stored
        assert ((actual[1].double() - expected[1]).abs() <= 1.001 * tolerance * expected[1].abs()).all()


@pytest.mark.parametrize("form", ["triton", "reference"])
@pytest.mark.usefixtures("four_programs")
def test_norm_of_a_sum_keeps_a_stream_in_fp32_beside_bf16_layers(form: str) -> None:
    """The stream and its gradient keep fp32's accuracy; a sub-layer's input and output are bf16."""
    with force(add_rms_norm=form):
        actual, expected = sum_results(torch.bfloat16, (7, 100), torch.float32)
    assert [t.dtype for t in actual] == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    tolerances = [FP32, 2**-8, FP32, 2**-8, 2**-8]
    for ours, theirs, tolerance in zip(actual, expected, tolerances, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("form", ["triton", "reference"])
def test_norm_of_a_stream_in_fp32_has_the_type_of_its_weight(form: str) -> None:
    x = torch.randn(5, 40)
    weight = torch.randn(40).bfloat16()
    dy = torch.randn(5, 40).bfloat16()
    y, dx, dweight = results(form, x.to(compute_device()), weight.to(compute_device()), dy.to(compute_device()), 1e-5)
    _, exact, _ = results("reference", x.double(), weight.double(), dy.double(), 1e-5)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert (dx.cpu().double() - exact).norm() <= FP32 * exact.norm()


def test_shared_gradient_of_both_summands_is_not_overwritten() -> None:
    x, added, weight = (torch.randn(shape, requires_grad=True) for shape in ((3, 8), (3, 8), (8,)))
    with force(add_rms_norm="triton"):
        for _ in range(2):
            summed, y = add_rms_norm(AddRMSNormInputs(x, added, weight, 1e-5))
            (summed.sum() + y.square().sum() + x.sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, added.grad + 2)


def test_triton_norms_refuse_unsupported_inputs() -> None:
    norm, summing = (op.named("triton") for op in (rms_norm, add_rms_norm))
    assert norm.device == summing.device == "cuda"
    inputs = RMSNormInputs(torch.zeros(2, 8), torch.zeros(8), 1e-5)
    assert norm.unsupported_reason(inputs) is None
    assert "float64" in norm.unsupported_reason(inputs._replace(x=inputs.x.double()))
    assert "8193 channels" in norm.unsupported_reason(inputs._replace(x=torch.zeros(1, MAX_CHANNELS + 1)))

    def reason(x: Tensor, added: Tensor) -> str | None:
        return summing.unsupported_reason(AddRMSNormInputs(x, added, inputs.weight, 1e-5))

    x = inputs.x
    assert reason(x, x) is None
    assert reason(x, x.bfloat16()) is None
    assert "torch.bfloat16" in reason(x.bfloat16(), x)
    assert "[1, 8]" in reason(x, x[:1])
    assert "float64" in reason(x.double(), x.double())


def shipped() -> None:
    """Run forward and backward on rows from a tiny model's length to the maximum."""
    norm = rms_norm.named("triton").function
    summing = add_rms_norm.named("triton").function
    for dtype in (torch.bfloat16, torch.float32):
        for channels in (64, 96, 192, 1024, 2304, MAX_CHANNELS):
            x = torch.empty(8192, 8, channels, dtype=dtype, device="meta", requires_grad=True)
            weight = torch.empty(channels, device="meta", requires_grad=True)
            y = norm(RMSNormInputs(x, weight, 1e-5))
            y.backward(torch.empty_like(y))
            torch.autograd.grad(summing(AddRMSNormInputs(x, torch.empty_like(x), weight, 1e-5)), (x, weight), (x, x))
            stream = x.float().detach().requires_grad_()
            narrow = weight.to(dtype)
            torch.autograd.grad(
                summing(AddRMSNormInputs(stream, x, narrow, 1e-5)), (stream, x), (stream, torch.empty_like(x))
            )


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_forward", "_backward", "_sum_of_parts"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.waves() == 1 for launch in launches if launch.kernel == "_backward")
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) == 8192 * 8 * MAX_CHANNELS


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, 2**-8)])
def test_triton_norms_equal_the_reference_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(512, 4, 2304, dtype=dtype)
    dy = torch.randn(512, 4, 2304, dtype=dtype)
    assert_right(x, torch.randn(2304), dy, tolerance)
    with force(add_rms_norm="triton"):
        for stream in (None, torch.float32):
            actual, expected = sum_results(dtype, (2048, 2304), stream)
            for ours, theirs in zip(actual, expected, strict=True):
                assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
