"""The Triton kernels of the delta rule against the reference in float64: outputs, states, every gradient.

Without CUDA they run in Triton's interpreter, on short rows cut into small chunks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.delta.triton import MOST_KEYS, MOST_VALUES
from tests.ops.compiling import compile_calls
from tests.ops.recurrences import (
    assert_near_reference,
    by_token,
    cut,
    delta_inputs,
    documents_of,
    floats,
    gradients,
    run,
    some_loss,
)

pytestmark = pytest.mark.usefixtures("interpreter")

FORM = "triton"
TOLERANCE = 2e-6  # of a tensor's norm, for fp32
GATES = pytest.mark.parametrize("gate", ["head", "channel"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens in parts of 4, and two slices of more than 16 keys or values."""
    if compute_device().type == "cpu":
        from hybridtron.ops.delta import kernels  # not above: the kernels' files are imported again

        monkeypatch.setattr(
            kernels, "tiles", lambda _: kernels.DeltaTiles(16, 4, keys=16, values=16, walk=16, decayed_keys=16)
        )


def inputs_of(gate: str, *sizes: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    return delta_inputs(*sizes, dtype=dtype, by_channel=gate == "channel")


@GATES
def test_triton_delta_rule_equals_the_reference_over_two_chunks(gate: str) -> None:
    """Use one boundary inside a chunk and one after it; only keys and values are padded."""
    inputs = inputs_of(gate, 1, 18, 1, 3, 4)._replace(documents_BL=documents_of(5, 12, 1, rows=1))
    assert_near_reference(delta_scan, FORM, inputs, TOLERANCE)


@pytest.mark.slow
@GATES
@pytest.mark.parametrize("borders", [[37], [5, 27, 11], [8, 1, 7], [32, 2]], ids=str)
def test_triton_delta_rule_equals_the_reference_with_documents_and_states(borders: list[int], gate: str) -> None:
    """Whole chunks and a ragged one; borders inside chunks, between them and between parts; padded keys and values."""
    inputs = inputs_of(gate, 1, sum(borders), 1, 3, 20)
    assert_near_reference(delta_scan, FORM, inputs._replace(documents_BL=documents_of(*borders, rows=1)), TOLERANCE)


@pytest.mark.slow
@GATES
@pytest.mark.parametrize("keys", [4, 20])
@pytest.mark.parametrize("length", [1, 16, 17])
def test_triton_delta_rule_equals_the_reference_at_lengths_of_about_a_chunk(length: int, keys: int, gate: str) -> None:
    """Use one slice of keys and two slices."""
    inputs = inputs_of(gate, 2, length, 2, keys, 4)._replace(state_BHNP=None)
    assert_near_reference(delta_scan, FORM, inputs, TOLERANCE)


@pytest.mark.slow
@GATES
@pytest.mark.parametrize("strength", [-8.0, -80.0])
def test_strong_decays_neither_overflow_nor_blur_the_weak_ones(strength: float, gate: str) -> None:
    inputs = inputs_of(gate, 1, 40, 1, 4, 4)
    with torch.no_grad():
        inputs.g_BLHG.fill_(-1e-3)
        if gate == "channel":
            inputs.g_BLHG[..., 0] = strength
        inputs.g_BLHG[:, ::5, :, -1] = strength
    assert_near_reference(delta_scan, FORM, inputs, TOLERANCE)


@pytest.mark.slow
@GATES
def test_repeated_key_with_steps_of_two_stays_accurate(gate: str) -> None:
    """The triangular system is as full as possible, and steps of 2 flip a value: rounding errors grow with its size."""
    inputs = inputs_of(gate, 1, 40, 1, 16, 4)
    with torch.no_grad():
        inputs.k_BLHN.copy_(inputs.k_BLHN[:, :1].expand_as(inputs.k_BLHN))
        inputs.beta_BLH.fill_(2)
        inputs.g_BLHG.fill_(-1e-3)
    assert_near_reference(delta_scan, FORM, inputs, 2e-5)


@pytest.mark.slow
@GATES
def test_triton_delta_rule_with_steps_of_zero_has_the_reference_gradients(gate: str) -> None:
    """Steps of 0 get a gradient, and nothing is divided by them."""
    inputs = inputs_of(gate, 1, 7, 1, 4, 4)
    with torch.no_grad():
        inputs.beta_BLH[:, ::2] = 0
    assert_near_reference(delta_scan, FORM, inputs, TOLERANCE)


@pytest.mark.slow
@GATES
def test_fp16_inputs_are_summed_in_fp32(gate: str) -> None:
    inputs = inputs_of(gate, 1, 9, 1, 4, 4, dtype=torch.float16)._replace(documents_BL=documents_of(3, 6, rows=1))
    results = assert_near_reference(delta_scan, FORM, inputs, 2**-9)
    assert results["last"].dtype == torch.float32
    assert {name: results[name].dtype for name in floats(inputs)} == {n: t.dtype for n, t in floats(inputs).items()}


@pytest.mark.slow
@GATES
def test_repeated_calls_give_equal_bits_and_pieces_equal_the_whole_row(gate: str) -> None:
    inputs = inputs_of(gate, 1, 30, 1, 4, 4)
    y, last = run(delta_scan, FORM, inputs)
    again, _ = run(delta_scan, FORM, inputs)
    assert torch.equal(y, again)
    whole = gradients(some_loss(y, last), inputs)
    first, state = run(delta_scan, FORM, cut(inputs, slice(19), inputs.state_BHNP))
    second, carried = run(delta_scan, FORM, cut(inputs, slice(19, None), state))
    joined = torch.cat([first, second], dim=1)
    torch.testing.assert_close((joined, carried), (y, last))
    for name, part in gradients(some_loss(joined, carried), inputs).items():
        assert (part - whole[name]).norm() <= TOLERANCE * whole[name].norm(), name


@pytest.mark.slow
@GATES
@pytest.mark.parametrize("border", [10, 16], ids=["inside a chunk", "between chunks"])
def test_documents_leak_no_bit_into_the_next(border: int, gate: str) -> None:
    """An infinite state does not leak either, although 0 times infinity is NaN."""
    inputs = inputs_of(gate, 1, border + 4, 1, 4, 4)._replace(documents_BL=documents_of(border, 4, rows=1))
    probed = []
    for state in (0.0, torch.inf):
        inputs = inputs._replace(state_BHNP=torch.full_like(inputs.state_BHNP, state).requires_grad_())
        y, last = run(delta_scan, FORM, inputs)
        assert not (state and y[:, :border].isfinite().any())
        grads = gradients(some_loss(y[:, border:], last), inputs)
        assert not grads["state_BHNP"].any()
        if state == 0:  # an infinite one times no gradient is no number, in its own document
            assert not any(grads[name][:, :border].any() for name in by_token(inputs))
        probed.append([y[:, border:], last, *(grads[name][:, border:] for name in by_token(inputs))])
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


def test_backward_keeps_the_inputs_alone() -> None:
    inputs = inputs_of("head", 1, 4, 1, 4, 4)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run(delta_scan, FORM, inputs)
    assert set(kept) <= {tensor.data_ptr() for tensor in floats(inputs).values()}


def test_triton_delta_rule_refuses_unsupported_inputs() -> None:
    form = delta_scan.named(FORM)
    assert form.device == "cuda"
    assert form.unsupported_reason(delta_inputs(dtype=torch.bfloat16)) is None
    assert "float64" in form.unsupported_reason(delta_inputs())
    assert "129 keys" in form.unsupported_reason(delta_inputs(key=MOST_KEYS + 1, dtype=torch.float32))


def shipped() -> None:
    """Forward and backward at the sizes of the recipes, in fp32 too, and at the largest that are taken."""
    recipes = [(96, 192, False), (128, 128, True)]
    sizes = [(torch.bfloat16, *size) for size in [*recipes, (MOST_KEYS, MOST_VALUES, False)]]
    for dtype, keys, values, by_channel in sizes + [(torch.float32, *size) for size in recipes]:
        with torch.device("meta"):
            inputs = delta_inputs(8, 4096, 8, keys, values, dtype, by_channel)
            inputs = inputs._replace(documents_BL=torch.zeros(8, 4096, dtype=torch.int32))
        y, last = delta_scan.named(FORM).function(inputs)
        torch.autograd.backward((y, last), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.slow
@pytest.mark.timeout(900)  # every channel's decays are some thousand instructions, and ptxas takes a minute for each
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {
        "factors", "scores_by_head", "scores_by_channel", "inverse", "walk", "outputs", "walk_back", "pair_weights",
        "pairs_by_head", "pairs_by_channel", "token_gradients",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    # not even where kernels of other ops with these names may; 8 bytes in fp32
    assert all(launch.stack <= 8 * (launch.kernel == "token_gradients") for launch in launches)
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 4096 * 8 * MOST_KEYS * MOST_VALUES / 32  # no state of every token


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@GATES
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize(("keys", "values"), [(64, 128), (96, 192), (128, 32), (16, 128), (128, 16)])
@pytest.mark.parametrize("lengths", [[300], [100, 28, 172]], ids=["stream", "documents"])
def test_triton_delta_rule_equals_the_reference_on_a_gpu(
    lengths: list[int], keys: int, values: int, dtype: torch.dtype, tolerance: float, gate: str
) -> None:
    """Heads of few values too: blocks of 32 have been wrong there, and right in the interpreter."""
    inputs = inputs_of(gate, 2, 300, 4, keys, values, dtype=dtype)._replace(documents_BL=documents_of(*lengths))
    assert_near_reference(delta_scan, FORM, inputs, tolerance)
