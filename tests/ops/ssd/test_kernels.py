"""The SSD scan's Triton kernels against the reference in float64: outputs, states, and every gradient.

Without CUDA they run in Triton's interpreter, on short rows cut into small chunks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.halves import joined
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
from tests.slow import slow_except

pytestmark = pytest.mark.usefixtures("interpreter")

slow = partial(pytest.param, marks=pytest.mark.slow)
FORM = "triton"
TOLERANCE = 2e-6  # of a tensor's norm, for fp32
BORDERS = [[[5, 11, 4]], [[8, 1], [3, 6]], *map(slow, ([[37]], [[5, 27, 11]], [[32, 2]]))]
"""Lengths of the documents of each row: borders inside chunks, between them, between the parts of a chunk; one."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 16, tokens=8, inner=16, outer=16)


def cut_in(monkeypatch: pytest.MonkeyPatch, chunk: int, tokens: int, inner: int, outer: int) -> None:
    from hybridtron.ops.ssd import kernels_row  # not above: the kernels' files are imported again for the interpreter

    monkeypatch.setattr(
        kernels_row, "tiles", lambda *_: kernels_row.ProductTiles(chunk, tokens, inner, outer, narrow=inner)
    )


def document_index(lengths: list[list[int]]) -> Tensor:
    """Indices as a packed batch has them: they continue from row to row."""
    rows = [torch.arange(3, 3 + len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


def assert_right(inputs: SSDInputs, tolerance: float = TOLERANCE) -> dict[str, Tensor]:
    return assert_near_reference(ssd_scan, FORM, inputs, tolerance)


@pytest.mark.parametrize("borders", BORDERS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_equals_the_reference_with_documents_and_states(borders: list[list[int]]) -> None:
    """Whole chunks and a ragged one; two groups, states in and out, sizes that are no powers of two."""
    inputs = ssd_inputs(len(borders), sum(borders[0]), 2, 3, 2, 20, torch.float32)
    assert_right(inputs._replace(documents_BL=document_index(borders)))


def token_first(tensor: Tensor) -> Tensor:
    """Return the values as a projection leaves them: tokens outermost in memory, and a part of a wider tensor."""
    wide = torch.cat([tensor.flatten(2), torch.randn(*tensor.shape[:2], 3)], dim=2).transpose(0, 1).contiguous()
    return wide.transpose(0, 1)[:, :, :-3].unflatten(2, tensor.shape[2:]).detach().requires_grad_()


@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_reads_and_writes_the_layouts_of_projections() -> None:
    from hybridtron.ops.ssd.kernels_row import SSDRow

    inputs = ssd_inputs(2, 20, 2, 3, 2, 5, torch.float32)._replace(documents_BL=document_index([[9, 11], [20]]))
    names = ["x_BLHP", "dt_BLH", "B_BLGN", "C_BLGN"]
    inputs = inputs._replace(**{name: token_first(getattr(inputs, name)) for name in names})
    row = SSDRow(*inputs, None, None).readable()
    assert all(getattr(row, name) is getattr(inputs, name) for name in names)
    results = assert_right(inputs)
    assert results["y"].transpose(0, 1).is_contiguous()


def test_triton_ssd_copies_inputs_whose_offsets_exceed_int32() -> None:
    from hybridtron.ops.ssd.kernels_row import MAX_STRIDE, readable_tokens

    within, beyond = (
        torch.empty_strided((1, 2, 2, 3), (6, s, 3, 1), device="meta") for s in (MAX_STRIDE, MAX_STRIDE + 1)
    )
    assert readable_tokens(within) is within
    assert readable_tokens(beyond).is_contiguous()


def test_triton_ssd_equals_the_reference_with_narrow_slices_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads are few programs, so that a state of 40 entries is divided among four."""
    from hybridtron.ops.ssd import kernels_row

    cut_in(monkeypatch, 16, tokens=8, inner=32, outer=32)
    monkeypatch.setattr(kernels_row, "MIN_WALK", 16)
    inputs = ssd_inputs(1, 20, 2, 3, 1, 40, torch.float32)
    assert kernels_row.SSDRow(*inputs, None, None).readable().walk_slices() == (16, 4)
    assert_right(inputs)


@pytest.mark.parametrize(("heads", "groups"), [slow(1, 1), (3, 1), (2, 2)])
@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_equals_the_reference_with_groups_of_heads(heads: int, groups: int) -> None:
    assert_right(ssd_inputs(1, 12, heads, 17, groups, 5, torch.float32))


@pytest.mark.parametrize("length", [1, slow(16), slow(17)])
@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_equals_the_reference_at_lengths_of_about_a_chunk(length: int) -> None:
    inputs = ssd_inputs(1, length, 2, 4, 1, 4, torch.float32)
    assert_right(inputs._replace(state_BHPN=None))


@pytest.mark.parametrize("programs", [1, 264], ids=["one program", "one for each head"])
@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_equals_the_reference_with_any_number_of_programs(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridtron.ops.ssd import kernels

    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    assert_right(ssd_inputs(1, 8, 3, 4, 1, 4, torch.float32)._replace(documents_BL=document_index([[3, 5]])))


@pytest.mark.parametrize("programs", slow_except([1, 264], 264), ids=["one program", "one for each head"])
@pytest.mark.usefixtures("small_tiles")
def test_gradients_are_right_and_side_by_side_if_the_last_state_is_unused(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridtron.ops.ssd import kernels

    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    inputs = ssd_inputs(2, 20, 4, 3, 2, 5, torch.float32)

    def of_output(form: str, inputs: SSDInputs) -> dict[str, Tensor]:
        tensors = floats(inputs)
        with force(ssd_scan=form):
            y_BLHP, _ = ssd_scan(inputs)
        weights = torch.linspace(-1, 1, y_BLHP.numel(), dtype=y_BLHP.dtype).view_as(y_BLHP)
        return dict(zip(tensors, torch.autograd.grad(y_BLHP, list(tensors.values()), weights), strict=True))

    ours = of_output(FORM, inputs)
    for name, expected in of_output("reference", exact(inputs)).items():
        assert (ours[name].double() - expected).norm() <= TOLERANCE * expected.norm(), name
    of_B, of_C = (ours[name].flatten(2) for name in ("B_BLGN", "C_BLGN"))
    assert joined(of_B, of_C).data_ptr() == of_B.data_ptr()


@pytest.mark.parametrize("strong", [slow(60.0), 3000.0])
def test_strong_decays_do_not_blur_weak_decays(strong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in five forgets all; differences of fp32 sums would be off by 1e-4, or by 1e-2, after some of them."""
    cut_in(monkeypatch, 128, tokens=64, inner=16, outer=16)
    inputs = ssd_inputs(1, 256, 1, 4, 1, 4, torch.float32)
    with torch.no_grad():
        inputs.A_H.fill_(-16)
        inputs.dt_BLH.fill_(-8)
        inputs.dt_BLH[:, ::5] = strong
        inputs.x_BLHP[:, ::5] *= 60 / strong
        inputs.dt_bias_H.zero_()
    assert_right(inputs)


@pytest.mark.usefixtures("small_tiles")
def test_triton_ssd_keeps_the_digits_of_small_steps() -> None:
    """softplus(-19) is 6e-9, which 1 + exp(-19) would have swallowed in fp32."""
    inputs = ssd_inputs(1, 20, 2, 4, 1, 4, torch.float32)
    with torch.no_grad():
        inputs.dt_BLH.copy_(torch.linspace(-30, -10, 40).view(1, 20, 2))
        inputs.dt_bias_H.zero_()
        inputs.D_H.zero_()
    assert_right(inputs._replace(state_BHPN=None))


@pytest.mark.usefixtures("bf16_products")
def test_bf16_inputs_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in(monkeypatch, 32, tokens=32, inner=16, outer=16)
    inputs = ssd_inputs(1, 40, 1, 16, 1, 16, torch.bfloat16)
    inputs = inputs._replace(documents_BL=document_index([[15, 25]]))
    results = assert_right(inputs, tolerance=2**-6)  # the interpreter rounds towards 0
    assert results["last"].dtype == torch.float32
    assert {name: results[name].dtype for name in floats(inputs)} == {n: t.dtype for n, t in floats(inputs).items()}


@pytest.mark.usefixtures("bf16_products")
def test_partial_sums_over_heads_are_fp32_with_bf16_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridtron.ops.ssd import kernels

    cut_in(monkeypatch, 16, tokens=16, inner=16, outer=16)
    partial_sums = kernels._partial_group_gradient
    dtypes = []

    def noted(*arguments: object, out: Tensor, **options: object) -> None:
        dtypes.append(out.dtype)
        partial_sums(*arguments, out=out, **options)

    monkeypatch.setattr(kernels, "_partial_group_gradient", noted)
    assert_right(ssd_inputs(1, 16, 2, 16, 1, 16, torch.bfloat16), tolerance=2**-6)
    assert dtypes == [torch.float32] * 2


@pytest.mark.usefixtures("small_tiles")
def test_states_of_fp16_inputs_may_exceed_the_range_of_fp16() -> None:
    inputs = ssd_inputs(1, 20, 1, 4, 1, 4, torch.float16)
    with torch.no_grad():
        inputs.state_BHPN.mul_(1e6)
        inputs.C_BLGN.mul_(1e-3)
    results = run(ssd_scan, FORM, inputs)
    expected = run(ssd_scan, "reference", exact(inputs))
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() <= 2**-9 * theirs.norm()


@pytest.mark.slow  # the interpreter has nothing that runs at once
@pytest.mark.usefixtures("small_tiles")
def test_repeated_calls_give_equal_bits() -> None:
    inputs = ssd_inputs(1, 20, 2, 4, 1, 4, torch.float32)._replace(documents_BL=document_index([[7, 13]]))
    first = assert_right(inputs)
    second = assert_right(inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_pieces_with_a_carried_state_equal_the_whole_row() -> None:
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
def test_documents_leak_no_bit_into_the_next(border: int) -> None:
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
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_backward_keeps_the_inputs_alone() -> None:
    inputs = ssd_inputs(1, 20, 1, 4, 1, 4, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run(ssd_scan, FORM, inputs)
    assert set(kept) <= {tensor.data_ptr() for tensor in floats(inputs).values()}


def test_triton_ssd_refuses_unsupported_inputs() -> None:
    def reason(inputs: SSDInputs) -> str | None:
        return ssd_scan.named(FORM).unsupported_reason(inputs)

    assert ssd_scan.named(FORM).device == "cuda"
    assert reason(ssd_inputs(dtype=torch.bfloat16)) is None
    assert "float64" in reason(ssd_inputs())
    assert "129 channels" in reason(ssd_inputs(head=MAX_HEAD + 1, dtype=torch.float32))
    assert "257" in reason(ssd_inputs(size=MAX_STATE + 1, dtype=torch.float32))


def shipped() -> None:
    """Forward and backward at the sizes of published models, and at the largest that are taken."""
    sizes = {
        torch.bfloat16: [(24, 64, 1, 128), (128, 64, 8, 128), (16, 128, 1, MAX_STATE)],
        torch.float16: [(24, 64, 1, 128)],
        torch.float32: [(24, 64, 1, 128), (16, MAX_HEAD, 1, MAX_STATE)],
    }
    for dtype, models in sizes.items():
        for model in models:
            launch_both_passes(8, 8192, model, dtype)
    launch_both_passes(1, 2048, (24, 64, 1, 128), torch.bfloat16)  # several programs for a group's heads


def launch_both_passes(rows: int, length: int, model: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    with torch.device("meta"):
        inputs = ssd_inputs(rows, length, *model, dtype)
        inputs = inputs._replace(documents_BL=torch.zeros(rows, length, dtype=torch.int32))
    y, last = ssd_scan.named(FORM).function(inputs)
    torch.autograd.backward((y, last), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    kernels = {launch.kernel for launch in launches}
    assert kernels == {
        "decays", "walk", "group_scores", "outputs", "token_gradients", "group_gradients", "step_gradients",
        "sum_of_splits", "_sum_of_parts",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) < 8 * 8192 * 128 * 64 * 128 / 16  # no state of every token


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("head", "state"), [(64, 128), (32, 128), (16, 128), (MAX_HEAD, MAX_STATE)])
@pytest.mark.parametrize("lengths", [None, [[300], [100, 28, 172]]], ids=["stream", "documents"])
def test_triton_ssd_equals_the_reference_on_a_gpu(
    lengths: list[list[int]] | None, head: int, state: int, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = ssd_inputs(2, 300, 4, head, 2, state, dtype)
    if lengths is not None:
        inputs = inputs._replace(documents_BL=document_index(lengths))
    assert_right(inputs, tolerance)
