"""The Triton kernels of gated linear attention against the reference in float64: outputs, states, every gradient.

Without CUDA they run in Triton's interpreter, on short rows cut into small chunks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton.language as tl
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.gla import gla_scan
from hybridtron.ops.gla.triton import KEYS, VALUES
from tests.ops.compiling import compile_calls
from tests.ops.recurrences import (
    assert_near_reference,
    by_token,
    cut,
    documents_of,
    floats,
    gla_inputs,
    gradients,
    run,
    some_loss,
)

pytestmark = pytest.mark.usefixtures("interpreter")

slow = partial(pytest.param, marks=pytest.mark.slow)
FORM = "triton"
TOLERANCE = 2e-6  # of a tensor's norm, for fp32


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens in parts of 8, and two slices of more than 16 keys or values."""
    if compute_device().type == "cpu":
        from hybridtron.ops.gla import kernels  # not above: the kernels' files are imported again for the interpreter

        monkeypatch.setattr(kernels, "tiles", lambda _: kernels.ChunkTiles(16, 8, 16, 16))


@pytest.mark.parametrize(
    "borders", [[5, 9, 4], *(slow(lengths) for lengths in ([37], [5, 27, 11], [8, 1, 7], [32, 2]))], ids=str
)
def test_triton_gla_equals_the_reference_with_documents_and_states(borders: list[int]) -> None:
    """Whole chunks and a ragged one; borders inside chunks, between them and between parts; padded keys and values."""
    inputs = gla_inputs(1, sum(borders), 1, 3, 20, torch.float32)
    assert_near_reference(gla_scan, FORM, inputs._replace(documents_BL=documents_of(*borders, rows=1)), TOLERANCE)


@pytest.mark.parametrize("length", [1, slow(16), slow(17)])
def test_triton_gla_equals_the_reference_at_lengths_of_about_a_chunk(length: int) -> None:
    inputs = gla_inputs(2, length, 1, 4, 4, torch.float32)._replace(state_BHNP=None)
    assert_near_reference(gla_scan, FORM, inputs, TOLERANCE)


@pytest.mark.slow
def test_triton_gla_equals_the_reference_with_heads_that_are_no_power_of_2() -> None:
    """Cut 33 keys and 35 values into slices of 16, without unused slices."""
    assert_near_reference(gla_scan, FORM, gla_inputs(1, 20, 1, 33, 35, torch.float32), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [-8.0, -80.0])
def test_strong_decays_neither_overflow_nor_blur_the_weak_ones(strength: float) -> None:
    inputs = gla_inputs(1, 40, 1, 4, 4, torch.float32)
    with torch.no_grad():
        inputs.g_BLHN.fill_(-1e-3)
        inputs.g_BLHN[..., 0] = strength
        inputs.g_BLHN[:, ::5, :, 1] = strength
    assert_near_reference(gla_scan, FORM, inputs, TOLERANCE)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2**-9), slow(torch.bfloat16, 2**-6)])
def test_inputs_of_16_bits_are_summed_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    """The tolerance for bf16 is large: the interpreter rounds to bf16 towards 0."""
    inputs = gla_inputs(1, 9, 1, 4, 4, dtype)._replace(documents_BL=documents_of(3, 6, rows=1))
    results = assert_near_reference(gla_scan, FORM, inputs, tolerance)
    assert results["last"].dtype == torch.float32
    assert {name: results[name].dtype for name in floats(inputs)} == {n: t.dtype for n, t in floats(inputs).items()}


@pytest.mark.slow
def test_repeated_calls_give_equal_bits_and_pieces_equal_the_whole_row() -> None:
    inputs = gla_inputs(1, 30, 1, 4, 4, torch.float32)
    y, last = run(gla_scan, FORM, inputs)
    again, _ = run(gla_scan, FORM, inputs)
    assert torch.equal(y, again)
    whole = gradients(some_loss(y, last), inputs)
    first, state = run(gla_scan, FORM, cut(inputs, slice(19), inputs.state_BHNP))
    second, carried = run(gla_scan, FORM, cut(inputs, slice(19, None), state))
    joined = torch.cat([first, second], dim=1)
    torch.testing.assert_close((joined, carried), (y, last))
    for name, part in gradients(some_loss(joined, carried), inputs).items():
        assert (part - whole[name]).norm() <= TOLERANCE * whole[name].norm(), name


@pytest.mark.parametrize("border", [10, slow(16)], ids=["inside a chunk", "between chunks"])
def test_documents_leak_no_bit_into_the_next(border: int) -> None:
    """An infinite state does not leak either, although 0 times infinity is NaN."""
    inputs = gla_inputs(1, border + 4, 1, 4, 4, torch.float32)._replace(documents_BL=documents_of(border, 4, rows=1))
    probed = []
    for state in (0.0, torch.inf):
        inputs = inputs._replace(state_BHNP=torch.full_like(inputs.state_BHNP, state).requires_grad_())
        y, last = run(gla_scan, FORM, inputs)
        grads = gradients(some_loss(y[:, border:], last), inputs)
        assert not grads["state_BHNP"].any()
        if state == 0:  # an infinite one times no gradient is no number, in its own document
            assert not any(grads[name][:, :border].any() for name in by_token(inputs))
        probed.append([y[:, border:], last, *(grads[name][:, border:] for name in by_token(inputs))])
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


def sums_of_rows(x_TN, sum_TN, PRODUCT: tl.constexpr, PRECISION: tl.constexpr) -> None:
    """For each of 16 tokens, store the sum of x over all later tokens."""
    place_T = tl.arange(0, 16)
    at_TN = place_T[:, None] * 16 + place_T[None, :]
    mask_TT = place_T[:, None] < place_T[None, :]
    tl.store(sum_TN + at_TN, sums_by_mask(mask_TT, tl.load(x_TN + at_TN), PRODUCT, PRECISION))  # noqa: F821


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_by_mask_have_the_precision_of_fp32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strong decays beside weak ones, as three bf16 numbers hold them; two such numbers would be off by 1e-5."""
    import triton

    from hybridtron.ops.gla import kernels_forward
    from hybridtron.ops.ssd.kernels_row import products_of

    monkeypatch.setitem(globals(), "sums_by_mask", kernels_forward.sums_by_mask)
    device = compute_device()
    x_TN = -torch.randn(16, 16, device=device).mul(3).exp()
    sum_TN = torch.empty_like(x_TN)
    triton.jit(sums_of_rows)[(1,)](x_TN, sum_TN, **products_of(dtype))
    mask_TT = torch.ones(16, 16, dtype=torch.float64, device=device).triu(1)
    torch.testing.assert_close(sum_TN.double(), mask_TT @ x_TN.double(), rtol=1e-6, atol=0)


def test_backward_keeps_the_inputs_alone() -> None:
    inputs = gla_inputs(1, 4, 1, 4, 4, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run(gla_scan, FORM, inputs)
    assert set(kept) <= {tensor.data_ptr() for tensor in floats(inputs).values()}


def test_triton_gla_refuses_unsupported_inputs() -> None:
    form = gla_scan.named(FORM)
    assert form.device == "cuda"
    assert form.unsupported_reason(gla_inputs(dtype=torch.bfloat16)) is None
    assert "float64" in form.unsupported_reason(gla_inputs())
    assert "257 keys" in form.unsupported_reason(gla_inputs(key=KEYS + 1, dtype=torch.float32))


def shipped() -> None:
    """Run forward and backward at the sizes of published models, and at the largest allowed ones."""
    for dtype, key, value in (
        (torch.bfloat16, 192, 384),
        (torch.bfloat16, 128, 256),
        (torch.float16, 128, 256),
        (torch.float32, KEYS, VALUES),
    ):
        with torch.device("meta"):
            inputs = gla_inputs(8, 8192, 4, key, value, dtype)
            inputs = inputs._replace(documents_BL=torch.zeros(8, 8192, dtype=torch.int32))
        y, last = gla_scan.named(FORM).function(inputs)
        torch.autograd.backward((y, last), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {
        "chunk_states", "pass_states", "scores", "outputs", "pair_weights", "value_gradients", "pairs",
        "token_gradients",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 8192 * 4 * KEYS * VALUES / 32  # no state of every token


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("keys", "values"), [(64, 128), (128, 32), (32, 128), (128, 16)])
@pytest.mark.parametrize("lengths", [[300], [100, 28, 172]], ids=["stream", "documents"])
def test_triton_gla_equals_the_reference_on_a_gpu(
    lengths: list[int], keys: int, values: int, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = gla_inputs(2, 300, 4, keys, values, dtype)._replace(documents_BL=documents_of(*lengths))
    assert_near_reference(gla_scan, FORM, inputs, tolerance)
