"""The SSD scan's Triton kernels against the reference in float64: outputs, states, and every gradient.

Without CUDA they run in Triton's interpreter, on short rows cut into small chunks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.ops.ssd.triton import MAX_HEAD, MAX_STATE
from tests.ops.compiling import compile_calls
from tests.ops.recurrences import (
    assert_near_reference,
    by_token,
    cut,
    exact,
    floats,
    gradients,
    run,
    some_loss,
    ssd_inputs,
)

pytestmark = pytest.mark.usefixtures("interpreter")

slow = partial(pytest.param, marks=pytest.mark.slow)
FORM = "triton"
TOLERANCE = 2e-6  # of a tensor's norm, for fp32
BORDERS = [[[5, 11, 4]], [[8, 1], [3, 6]], *map(slow, ([[37]], [[5, 27, 11]], [[32, 2]]))]
"""Lengths of the documents of each row: borders inside chunks, between them, between the parts of a chunk; one."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 16, own=8, inner=16, outer=16)


def cut_in(monkeypatch: pytest.MonkeyPatch, chunk: int, own: int, inner: int, outer: int) -> None:
    from hybridtron.ops.ssd import kernels_row  # not above: the kernels' files are imported again for the interpreter

    monkeypatch.setattr(kernels_row, "tiles", lambda *_: kernels_row.ProductTiles(chunk, own, inner, outer))


def document_index(lengths: list[list[int]]) -> Tensor:
    """Indices as a packed batch has them: they continue from row to row."""
    rows = [torch.arange(3, 3 + len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


def assert_right(inputs: SSDInputs, tolerance: float = TOLERANCE) -> dict[str, Tensor]:
    return assert_near_reference(ssd_scan, FORM, inputs, tolerance)


@pytest.mark.parametrize("borders", BORDERS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_documents_and_states(borders: list[list[int]]) -> None:
    """Whole chunks and a ragged one; two groups, states in and out, sizes that are no powers of two."""
    inputs = ssd_inputs(len(borders), sum(borders[0]), 2, 3, 2, 20, torch.float32)
    assert_right(inputs._replace(documents_BL=document_index(borders)))


@pytest.mark.parametrize(("heads", "groups"), [slow(1, 1), (3, 1), (2, 2)])
@pytest.mark.usefixtures("small_tiles")
def test_groups_of_heads(heads: int, groups: int) -> None:
    assert_right(ssd_inputs(1, 12, heads, 17, groups, 5, torch.float32))


@pytest.mark.parametrize("length", [1, slow(16), slow(17)])
@pytest.mark.usefixtures("small_tiles")
def test_rows_about_a_chunk_long(length: int) -> None:
    inputs = ssd_inputs(1, length, 2, 4, 1, 4, torch.float32)
    assert_right(inputs._replace(state_BHPN=None))


@pytest.mark.parametrize("programs", [1, 264], ids=["one program", "one for each head"])
@pytest.mark.usefixtures("small_tiles")
def test_heads_of_a_group_in_one_program_or_many(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.ssd import kernels

    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    assert_right(ssd_inputs(1, 8, 3, 4, 1, 4, torch.float32)._replace(documents_BL=document_index([[3, 5]])))


@pytest.mark.parametrize("strong", [slow(60.0), 3000.0])
def test_strong_decays_do_not_blur_the_weak_ones(strong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in five forgets all; differences of fp32 sums would be off by 1e-4, or by 1e-2, after some of them."""
    cut_in(monkeypatch, 128, own=64, inner=16, outer=16)
    inputs = ssd_inputs(1, 256, 1, 4, 1, 4, torch.float32)
    with torch.no_grad():
        inputs.A_H.fill_(-16)
        inputs.dt_BLH.fill_(-8)
        inputs.dt_BLH[:, ::5] = strong
        inputs.x_BLHP[:, ::5] *= 60 / strong
        inputs.dt_bias_H.zero_()
    assert_right(inputs)


@pytest.mark.usefixtures("small_tiles")
def test_small_steps_keep_their_digits() -> None:
    """softplus(-19) is 6e-9, which 1 + exp(-19) would have swallowed in fp32."""
    inputs = ssd_inputs(1, 20, 2, 4, 1, 4, torch.float32)
    with torch.no_grad():
        inputs.dt_BLH.copy_(torch.linspace(-30, -10, 40).view(1, 20, 2))
        inputs.dt_bias_H.zero_()
        inputs.D_H.zero_()
    assert_right(inputs._replace(state_BHPN=None))


@pytest.mark.usefixtures("bf16_products")
def test_bf16_sums_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 32, own=32, inner=16, outer=16)
    inputs = ssd_inputs(1, 40, 1, 16, 1, 16, torch.bfloat16)
    inputs = inputs._replace(documents_BL=document_index([[15, 25]]))
    found = assert_right(inputs, tolerance=2**-6)  # the interpreter rounds towards 0
    assert found["last"].dtype == torch.float32
    assert {name: found[name].dtype for name in floats(inputs)} == {n: t.dtype for n, t in floats(inputs).items()}


@pytest.mark.usefixtures("small_tiles")
def test_fp16_states_may_be_larger_than_fp16() -> None:
    inputs = ssd_inputs(1, 20, 1, 4, 1, 4, torch.float16)
    with torch.no_grad():
        inputs.state_BHPN.mul_(1e6)
        inputs.C_BLGN.mul_(1e-3)
    results = run(ssd_scan, FORM, inputs), run(ssd_scan, "reference", exact(inputs))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 2**-9 * expected.norm()


@pytest.mark.slow  # the interpreter has nothing that runs at once
@pytest.mark.usefixtures("small_tiles")
def test_the_same_bits_again() -> None:
    inputs = ssd_inputs(1, 20, 2, 4, 1, 4, torch.float32)._replace(documents_BL=document_index([[7, 13]]))
    first = assert_right(inputs)
    second = assert_right(inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_cut_and_carried_on_is_whole() -> None:
    inputs = ssd_inputs(1, 30, 1, 4, 1, 4, torch.float32)
    y, last = run(ssd_scan, FORM, inputs)
    whole = gradients(some_loss(y, last), inputs)
    first, state = run(ssd_scan, FORM, cut(inputs, slice(19), inputs.state_BHPN))
    second, carried = run(ssd_scan, FORM, cut(inputs, slice(19, None), state))
    torch.testing.assert_close(torch.cat([first, second], dim=1), y)
    torch.testing.assert_close(carried, last)
    parts = gradients(some_loss(torch.cat([first, second], dim=1), carried), inputs)
    for name, expected in whole.items():
        assert (parts[name] - expected).norm() <= TOLERANCE * expected.norm(), name


@pytest.mark.parametrize("border", [10, slow(16)], ids=["inside a chunk", "between chunks"])
@pytest.mark.usefixtures("small_tiles")
def test_no_bit_of_a_document_leaks_into_the_next(border: int) -> None:
    """An infinite state does not leak either, although 0 times infinity is NaN."""
    inputs = ssd_inputs(1, 20, 1, 4, 1, 4, torch.float32)._replace(documents_BL=document_index([[border, 20 - border]]))
    tokens = by_token(inputs)
    probed = []
    for state in (0.0, torch.inf):
        inputs = inputs._replace(state_BHPN=torch.full_like(inputs.state_BHPN, state).requires_grad_())
        y, last = run(ssd_scan, FORM, inputs)
        grads = gradients(some_loss(y[:, border:], last), inputs)
        assert not grads["state_BHPN"].any()
        if state == 0:  # an infinite one times no gradient is no number, in its own document
            assert not any(grads[name][:, :border].any() for name in tokens)
        probed.append([y[:, border:], last, *(grads[name][:, border:] for name in tokens)])
    assert all(torch.equal(one, other) for one, other in zip(*probed, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_backward_keeps_the_inputs_alone() -> None:
    inputs = ssd_inputs(1, 20, 1, 4, 1, 4, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run(ssd_scan, FORM, inputs)
    assert set(kept) <= {tensor.data_ptr() for tensor in floats(inputs).values()}


def test_what_it_does_not_support() -> None:
    def reason(inputs: SSDInputs) -> str | None:
        return ssd_scan.named(FORM).unsupported_reason(inputs)

    assert ssd_scan.named(FORM).device == "cuda"
    assert reason(ssd_inputs(dtype=torch.bfloat16)) is None
    assert "float64" in reason(ssd_inputs())
    assert "129 channels" in reason(ssd_inputs(head=MAX_HEAD + 1, dtype=torch.float32))
    assert "257 state" in reason(ssd_inputs(size=MAX_STATE + 1, dtype=torch.float32))


def shipped() -> None:
    """Forward and backward at the sizes of published models, and at the largest that are taken."""
    sizes = {
        torch.bfloat16: [(24, 64, 1, 128), (128, 64, 8, 128), (16, 128, 1, MAX_STATE)],
        torch.float16: [(24, 64, 1, 128)],
        torch.float32: [(24, 64, 1, 128), (16, MAX_HEAD, 1, MAX_STATE)],
    }
    for dtype, models in sizes.items():
        for heads, head, groups, state in models:
            with torch.device("meta"):
                inputs = ssd_inputs(8, 8192, heads, head, groups, state, dtype)
                inputs = inputs._replace(documents_BL=torch.zeros(8, 8192, dtype=torch.int32))
            y, last = ssd_scan.named(FORM).function(inputs)
            torch.autograd.backward((y, last), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_what_is_shipped_fits_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    kernels = {launch.kernel for launch in launches}
    assert kernels == {
        "decays", "chunk_states", "pass_states", "outputs", "token_gradients", "group_gradients", "step_gradients",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) < 8 * 8192 * 128 * 64 * 128 / 16  # no state of every token


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("head", "state"), [(64, 128), (32, 128), (16, 128), (MAX_HEAD, MAX_STATE)])
@pytest.mark.parametrize("lengths", [None, [[300], [100, 28, 172]]], ids=["stream", "documents"])
def test_on_a_gpu(lengths: list[list[int]] | None, head: int, state: int, dtype: torch.dtype, tolerance: float) -> None:
    inputs = ssd_inputs(2, 300, 4, head, 2, state, dtype)
    documents = None if lengths is None else document_index(lengths)
    assert_right(inputs._replace(documents_BL=documents), tolerance)
