"""The Triton kernels of token mixing against the reference in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.token_mix import TokenMixInputs, token_mix
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")
FP32 = 1e-6  # of a tensor's norm


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.token_mix import kernels  # not above: imported again for the interpreter

    monkeypatch.setattr(kernels, "TOKENS", 4)
    monkeypatch.setattr(kernels, "CHANNELS", 8)


def results(form: str, inputs: TokenMixInputs, grads: list[Tensor]) -> list[Tensor]:
    """Return all streams, and the gradients of all inputs that have some."""
    inputs = TokenMixInputs(*(x.detach().requires_grad_() if _is_float(x) else x for x in inputs))
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    with force(token_mix=form):
        streams = token_mix(inputs)
    return [*(stream.detach() for stream in streams), *torch.autograd.grad(streams, leaves, grads)]


def _is_float(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def assert_right(inputs: TokenMixInputs, tolerance: float) -> list[Tensor]:
    grads = [torch.randn(inputs.x_LBD.shape).to(inputs.x_LBD.dtype) for _ in inputs.mix_SD]
    exact = TokenMixInputs(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs))
    expected = results("reference", exact, [grad.double() for grad in grads])
    device = compute_device()
    on_device = TokenMixInputs(*(None if x is None else x.to(device) for x in inputs))
    actual = results("triton", on_device, [grad.to(device) for grad in grads])
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == inputs.x_LBD.dtype
        assert ours.shape == theirs.shape
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()
    return actual


def random_inputs(length: int, rows: int, channels: int, streams: int) -> TokenMixInputs:
    documents_BL = (torch.rand(rows, length) < 0.3).cumsum(1).int()
    change = torch.randn(streams, length, rows, channels)
    return TokenMixInputs(
        torch.randn(length, rows, channels), torch.randn(streams, channels), change, torch.randn(rows, channels),
        documents_BL,
    )  # fmt: skip


@pytest.mark.parametrize(("length", "rows", "channels", "streams"), [(1, 1, 3, 1), (7, 3, 10, 5), (6, 2, 8, 2)])
@pytest.mark.usefixtures("small_tiles")
def test_triton_token_mix_equals_the_reference(length: int, rows: int, channels: int, streams: int) -> None:
    inputs = random_inputs(length, rows, channels, streams)
    assert_right(inputs, FP32)
    assert_right(inputs._replace(change_SLBD=None), FP32)
    assert_right(inputs._replace(first_BD=None), FP32)
    assert_right(inputs._replace(documents_BL=None), FP32)


def test_triton_token_mix_of_bf16_is_rounded_once() -> None:
    """The interpreter truncates to bf16: an error of up to 2^-7 of each value."""
    inputs = random_inputs(6, 2, 8, 3)
    assert_right(TokenMixInputs(*(x.bfloat16() if _is_float(x) else x for x in inputs)), 2**-7)


@pytest.mark.usefixtures("small_tiles")
def test_repeated_calls_give_equal_bits() -> None:
    inputs = random_inputs(7, 2, 8, 2)
    grads = list(torch.randn(2, 7, 2, 8))
    first, second = (results("triton", inputs, grads) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_tokens_have_gradients_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    device = compute_device()
    inputs = TokenMixInputs(*(None if x is None else x.to(device) for x in random_inputs(0, 2, 8, 3)))
    grads = list(torch.empty(3, 0, 2, 8, device=device))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, math.nan))
    *streams, grad_x, grad_mix, grad_change, grad_first = results("triton", inputs, grads)
    assert {stream.shape for stream in (*streams, grad_x)} == {inputs.x_LBD.shape}
    assert grad_change.shape == (3, 0, 2, 8)
    assert (grad_mix == 0).all()
    assert (grad_first == 0).all()


def shipped() -> None:
    """Launch the kernels at a recipe's sizes, as both of RWKV-6's mixers do; then with one row and its predecessor."""
    with torch.device("meta"):
        x = torch.empty(256, 256, 512, dtype=torch.bfloat16, requires_grad=True)
        documents_BL = torch.empty(256, 256, dtype=torch.int32)
        for streams, changes in ((1, False), (2, False), (5, True)):
            mix = torch.empty(streams, 512, dtype=torch.bfloat16, requires_grad=True)
            change = x.new_empty(streams, *x.shape).requires_grad_() if changes else None
            mixed = token_mix.named("triton").function(TokenMixInputs(x, mix, change, None, documents_BL))
            torch.autograd.backward(mixed, [torch.empty_like(x)] * streams)
        x = torch.empty(256, 1, 512, dtype=torch.bfloat16, requires_grad=True)
        mix = torch.empty(2, 512, dtype=torch.bfloat16, requires_grad=True)
        first = torch.empty(1, 512, dtype=torch.bfloat16, requires_grad=True)
        mixed = token_mix.named("triton").function(TokenMixInputs(x, mix, None, first, None))
        torch.autograd.backward(mixed, [torch.empty_like(x)] * 2)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_forward", "_backward", "_sum_of_parts"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
