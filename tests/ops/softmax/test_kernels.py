"""The kernels of the head's loss: compared with the references in float64, and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.loss import LinearCrossEntropyInputs, linear_cross_entropy
from hybridtron.ops.softmax import SoftmaxGradientsInputs, SoftmaxSumsInputs, softmax_gradients, softmax_sums
from hybridtron.planning import count
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")

TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)
SIZES = pytest.mark.parametrize("size", [3, 4096, 4097, 9000])


def case(size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return logits of five tokens, labels (two not in this shard) and a mask; the last row is nan and masked."""
    generator = torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(5, size, generator=generator)).to(dtype)
    logits[0, size - 1] = 30.0  # a late greatest one
    labels = torch.tensor([size - 1, 0, -3, size, 1])
    logits[4, 2] = torch.nan
    return [t.to(device) for t in (logits, labels, torch.tensor([True, True, True, True, False]))]


@DTYPES
@SIZES
def test_triton_softmax_sums_equal_the_reference(size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, labels, _ = case(size, dtype, device)
    with force("triton"):
        actual = softmax_sums(SoftmaxSumsInputs(logits, labels))
    with force("reference"):
        expected = softmax_sums(SoftmaxSumsInputs(logits.double(), labels))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours[:4].double(), theirs[:4], rtol=2e-6, atol=0)


@DTYPES
@SIZES
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_triton_softmax_gradients_equal_the_reference(
    size: int, dtype: torch.dtype, z_loss: float, device: torch.device
) -> None:
    logits, labels, mask = case(size, dtype, device)
    lse = logits.double().logsumexp(-1)
    with force("reference"):
        expected = softmax_gradients(SoftmaxGradientsInputs(logits.double(), labels, mask, lse, z_loss))
    with force("triton"):
        actual = softmax_gradients(SoftmaxGradientsInputs(logits, labels, mask, lse.float(), z_loss))
    assert actual.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] / 2)
    assert not actual[4].any()
    assert actual[2].sum() > 0.9  # its label is elsewhere


@DTYPES
def test_chunked_loss_by_triton_kernels_equals_the_reference(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op in three parts, forward and backward."""
    monkeypatch.setattr(count, "LOGITS_BYTES", 3 * 50 * dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, generator=generator).to(device, dtype).requires_grad_() for n in (8, 50))
    labels = torch.randint(50, (8,), generator=generator).to(device)
    mask = torch.tensor([True] * 6 + [False] * 2, device=device)
    inputs = LinearCrossEntropyInputs(x, weight, labels, mask, 1e-3)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    results = loss_and_gradients(inputs, "chunked", "triton")
    expected = loss_and_gradients(inputs._replace(x_TD=exact_x, weight_VD=exact_weight), "reference", "reference")
    for ours, theirs in zip(results, expected, strict=True):
        limit = 4 * TOLERANCES[dtype] * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=limit)


def loss_and_gradients(inputs: LinearCrossEntropyInputs, form: str, softmax: str) -> list[Tensor]:
    with force(linear_cross_entropy=form, softmax_sums=softmax, softmax_gradients=softmax):
        loss = linear_cross_entropy(inputs)
    gradients = torch.autograd.grad(2 * loss.total, (inputs.x_TD, inputs.weight_VD))
    return [loss.total.detach(), loss.per_token, *gradients]


def shipped() -> None:
    """Heads of 32000 and 128256 tokens, the second in two shares, at the chunks that the planner counts."""
    for size, dtype in ((32_000, torch.bfloat16), (64_128, torch.bfloat16), (32_000, torch.float32)):
        tokens = count.logits_at_a_time(16_384, size, dtype.itemsize)
        logits = torch.empty(tokens, size, dtype=dtype, device="meta")
        labels = torch.empty(tokens, dtype=torch.int64, device="meta")
        mask, lse = (torch.empty(tokens, dtype=kind, device="meta") for kind in (torch.bool, torch.float32))
        with force("triton"):
            softmax_sums(SoftmaxSumsInputs(logits, labels))
            softmax_gradients(SoftmaxGradientsInputs(logits, labels, mask, lse, 1e-4))


@pytest.mark.slow
def test_triton_softmax_compiles_for_a_hopper_gpu() -> None:
    launches, _ = compile_calls("tests.ops.softmax.test_kernels", "shipped")
    assert {launch.kernel for launch in launches} == {"sums_of_rows", "gradients_of_blocks"}
    assert not [fault for launch in launches for fault in launch.faults()]
    for launch in launches:
        assert launch.instructions["ex2"] >= 16  # one for each of a thread's logits
        assert launch.instructions["atom"] == launch.instructions["red"] == 0


@pytest.mark.gpu
@DTYPES
def test_triton_softmax_equals_the_reference_on_a_gpu(dtype: torch.dtype, device: torch.device) -> None:
    """The kernels as they are compiled, at a size that is no multiple of anything."""
    assert device.type == "cuda"
    test_triton_softmax_sums_equal_the_reference(9000, dtype, device)
    test_triton_softmax_gradients_equal_the_reference(9000, dtype, 1e-2, device)
