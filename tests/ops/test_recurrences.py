"""Properties of every recurrence in every form: its gradients, its reference, and its results in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.recurrences import (
    RECURRENCES,
    STATE_TOKENS,
    TWO_DOCUMENTS,
    Recurrence,
    by_token,
    changed,
    computed,
    cut,
    documents_of,
    exact,
    floats,
    gradients,
    run,
    some_loss,
    state_of,
    with_state,
)

DOCUMENTS = pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["stream", "documents"])
OPS = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)
FORMS = pytest.mark.parametrize(
    ("recurrence", "form"),
    [
        pytest.param(recurrence, form, id=f"{recurrence.name}-{form}")
        for recurrence in RECURRENCES
        for form in recurrence.forms
    ],
)
FAST_FORMS = pytest.mark.parametrize(
    ("recurrence", "form"),
    [
        pytest.param(recurrence, form, id=f"{recurrence.name}-{form}")
        for recurrence in RECURRENCES
        for form in recurrence.forms[1:]
    ],
)
SHORT = (1, 2, 15, 16, 17, 63, 64, 65, 129, 150)
LENGTHS = [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in range(1, 151)]


@pytest.fixture
def small_chunks(recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in recurrence.small_chunks:
        monkeypatch.setattr(module, name, value)


@FORMS
@DOCUMENTS
@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_slopes(recurrence: Recurrence, form: str, documents: Tensor | None) -> None:
    """Along random directions."""
    inputs = recurrence.make()._replace(documents_BL=documents)
    names = list(floats(inputs))

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(recurrence.op, form, inputs._replace(**dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(outputs, list(floats(inputs).values()), fast_mode=True)


@OPS
@pytest.mark.parametrize("length", LENGTHS)
def test_fast_forms_equal_the_reference_at_every_length(recurrence: Recurrence, length: int) -> None:
    """Compare in float64, with documents of one token or more."""
    inputs = recurrence.make(length=length)
    inputs = inputs._replace(documents_BL=torch.randint(1, 8, (2, length)).eq(1).cumsum(1))
    reference, *fast = (computed(recurrence.op, form, inputs) for form in recurrence.forms)
    for results in fast:
        assert_close(results, reference, rtol=1e-10, atol=1e-10)


@OPS
@pytest.mark.parametrize("lengths", [[300], [60, 4, 236]], ids=str)
def test_fast_forms_equal_the_reference_in_fp32(recurrence: Recurrence, lengths: list[int]) -> None:
    inputs = recurrence.make(length=300, dtype=torch.float32, **recurrence.wide)
    inputs = inputs._replace(documents_BL=documents_of(*lengths))
    reference = computed(recurrence.op, "reference", exact(inputs))
    for form in recurrence.forms[1:]:
        results = computed(recurrence.op, form, inputs)
        for name, expected in reference.items():
            assert_close(results[name].double(), expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@FAST_FORMS
def test_strong_decays_neither_overflow_nor_blur_the_weak_ones(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(rows=1, length=256, dtype=torch.float32)
    with torch.no_grad():
        recurrence.strong(inputs)
    results = computed(recurrence.op, form, inputs)
    for name, expected in computed(recurrence.op, "reference", exact(inputs)).items():
        assert (results[name].double() - expected).norm() <= 5e-6 * expected.norm(), name


@FORMS
def test_absent_state_equals_a_state_of_zeros(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(length=20)
    zeros = torch.zeros_like(getattr(inputs, state_of(inputs)))
    expected = computed(recurrence.op, form, with_state(inputs, zeros.requires_grad_()))
    for name, result in computed(recurrence.op, form, with_state(inputs, None)).items():
        assert torch.equal(result, expected[name])


@FORMS
@DOCUMENTS
@pytest.mark.usefixtures("small_chunks")
def test_pieces_with_a_carried_state_equal_the_whole_row(
    recurrence: Recurrence, form: str, documents: Tensor | None
) -> None:
    inputs = recurrence.make()._replace(documents_BL=documents)
    before = getattr(inputs, state_of(inputs))
    whole, last = run(recurrence.op, form, inputs)
    expected = gradients(some_loss(whole, last), inputs)
    for place in range(1, 11):
        if documents is not None and place in (4, 9):
            continue  # a state that is handed over belongs to the next row's first document: here it would not
        first, state = run(recurrence.op, form, cut(inputs, slice(place), before))
        second, state = run(recurrence.op, form, cut(inputs, slice(place, None), state))
        joined = torch.cat([first, second], dim=1)
        assert_close((joined, state), (whole, last))
        assert_close(gradients(some_loss(joined, state), inputs), expected)


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_document_in_mid_row_starts_without_a_state(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make()
    y, last = run(recurrence.op, form, inputs._replace(documents_BL=TWO_DOCUMENTS))
    for row, border in enumerate((4, 9)):
        alone = inputs._replace(**{name: t[row : row + 1] for name, t in floats(inputs).items() if "_B" in name})
        first, _ = run(recurrence.op, form, cut(alone, slice(border), getattr(alone, state_of(alone))))
        second, state = run(recurrence.op, form, cut(alone, slice(border, None), None))
        assert_close(y[row], torch.cat([first, second], dim=1)[0])
        assert_close(last[row], state[0])


@FORMS
@pytest.mark.parametrize("border", [70, 128], ids=["inside a chunk", "between chunks"])
def test_documents_leak_no_bit_into_the_next(recurrence: Recurrence, form: str, border: int) -> None:
    inputs = recurrence.make(length=200, dtype=torch.float32)._replace(documents_BL=documents_of(border, 200 - border))
    state = state_of(inputs)
    tokens = by_token(inputs)
    probed = []
    for factor in (1, 0.5):
        other = changed(inputs, Tensor.clone)
        with torch.no_grad():
            getattr(other, state).mul_(factor)
            for name in tokens:
                getattr(other, name)[:, :border] *= factor
        y, last = run(recurrence.op, form, other)
        grads = gradients(some_loss(y[:, border:], last), other)
        assert not grads[state].any()
        assert not any(grads[name][:, :border].any() for name in tokens)
        probed.append([y[:, border:], last, *grads.values()])
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


@FORMS
def test_later_tokens_change_no_bit_of_earlier_outputs(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(length=100, dtype=torch.float32)
    y, _ = run(recurrence.op, form, inputs)
    for place in (1, 17, 64, 99):
        other = changed(inputs, Tensor.clone)
        with torch.no_grad():
            for name in by_token(inputs):
                getattr(other, name)[:, place:] *= 0.5
        assert torch.equal(run(recurrence.op, form, other)[0][:, :place], y[:, :place])


@FORMS
@pytest.mark.usefixtures("small_chunks")
def test_infinite_state_stays_in_its_document(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make()._replace(documents_BL=TWO_DOCUMENTS)
    infinite = torch.full_like(getattr(inputs, state_of(inputs)), torch.inf).requires_grad_()
    fresh_y, fresh_last = run(recurrence.op, form, inputs)
    y, last = run(recurrence.op, form, with_state(inputs, infinite))
    assert all(torch.equal(y[row, border:], fresh_y[row, border:]) for row, border in enumerate((4, 9)))
    assert torch.equal(last, fresh_last)


@FORMS
def test_bf16_inputs_are_computed_in_fp32(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(length=100, dtype=torch.bfloat16)
    results = computed(recurrence.op, form, inputs)
    expected = computed(recurrence.op, "reference", exact(inputs))
    assert (results["y"].dtype, results["last"].dtype) == (torch.bfloat16, torch.float32)
    assert all(results[name].dtype == value.dtype for name, value in floats(inputs).items())
    assert_close(results["last"].double(), expected["last"], rtol=1e-5, atol=1e-5)
    for name, value in expected.items():
        assert_close(results[name].double(), value, rtol=2**-7, atol=2**-7 * value.abs().max().item())


@FAST_FORMS
def test_autocast_does_not_lower_the_precision(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(length=100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run(recurrence.op, form, inputs)
    assert torch.equal(y, run(recurrence.op, form, inputs)[0])


@FAST_FORMS
def test_backward_keeps_no_state_of_every_token(recurrence: Recurrence, form: str) -> None:
    inputs = recurrence.make(length=512, dtype=torch.float32, **recurrence.wide)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        _, last = run(recurrence.op, form, inputs)
    inputs_by_address = {t.data_ptr(): t.numel() for t in floats(inputs).values()}
    parameters = sum(t.numel() for name, t in floats(inputs).items() if "_B" not in name)  # in another order or type
    beyond_inputs = sum(t.numel() for address, t in kept.items() if address not in inputs_by_address)
    assert 0 < beyond_inputs <= 1.2 * last.numel() * 512 / STATE_TOKENS + parameters
