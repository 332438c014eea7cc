"""The delta rule against numbers worked out by hand, closed forms, its own gradients, and itself in pieces."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.delta import DeltaInputs, chunked, decay, delta_scan
from hybridtron.ops.dispatch import force
from hybridtron.ops.gla import GLAInputs, gla_scan

FORMS = ["reference", "chunked"]
FAST_FORMS = FORMS[1:]
TWO_DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
DOCUMENTS = [pytest.param(None, id="stream"), pytest.param(TWO_DOCUMENTS, id="documents")]
GATES = pytest.mark.parametrize("gate", ["head", "channel"])
PER_TOKEN = ("q", "k", "v", "beta", "g")
Named = dict[str, Tensor | None]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens in blocks of 2, so that 11 tokens have ragged ones of both."""
    monkeypatch.setattr(chunked, "CHUNK", 5)
    monkeypatch.setattr(decay, "SUB", 2)


def random_inputs(
    gate: str,
    rows: int = 2,
    length: int = 11,
    heads: int = 2,
    key: int = 3,
    value: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Named:
    """Arguments by name, in the op's order; keys of length 1, steps up to 2, and decays of which some are strong."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "q": torch.randn(rows, length, heads, key, dtype=dtype),
        "k": F.normalize(torch.randn(rows, length, heads, key, dtype=wide), dim=-1).to(dtype),
        "v": torch.randn(rows, length, heads, value, dtype=dtype),
        "beta": 2 * torch.rand(rows, length, heads, dtype=wide),
        "g": -torch.randn(rows, length, heads, 1 if gate == "head" else key, dtype=wide).exp(),
        "state": torch.randn(rows, heads, key, value, dtype=wide),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def run(form: str, inputs: Named, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with force(delta_scan=form):
        return delta_scan(DeltaInputs(*inputs.values(), documents))


def tokens_of(inputs: Named, tokens: slice, state: Tensor | None) -> Named:
    return {**{name: inputs[name][:, tokens] for name in PER_TOKEN}, "state": state}


def gradients(loss: Tensor, inputs: Named) -> dict[str, Tensor]:
    wanted = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def some_loss(y: Tensor, state: Tensor) -> Tensor:
    """A loss in which every output and every entry of the final state has its own weight."""
    weights_y = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    weights_state = torch.linspace(2, -1, state.numel(), dtype=state.dtype).view_as(state)
    return (weights_y * y).sum() + (weights_state * state.sin()).sum()


def everything(form: str, inputs: Named, documents: Tensor | None = None) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    y, state = run(form, inputs, documents)
    return {"y": y, "last": state} | gradients(some_loss(y, state), inputs)


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_replaced_by_hand(form: str) -> None:
    """Three tokens of one key: 8 is written, decays to 4 and moves half-way to 2, then is replaced by 5."""
    key = torch.tensor([0.6, 0.8]).expand(1, 3, 1, 2)
    v = torch.tensor([8.0, 2.0, 5.0]).view(1, 3, 1, 1)
    beta, g = torch.tensor([1.0, 0.5, 1.0]).view(1, 3, 1), torch.tensor([0.0, math.log(0.5), 0.0]).view(1, 3, 1, 1)
    y, state = run(form, {"q": key, "k": key, "v": v, "beta": beta, "g": g, "state": None})
    assert_close(y.flatten(), torch.tensor([8.0, 3.0, 5.0]))
    assert_close(state.flatten(), torch.tensor([3.0, 4.0]))


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_orthonormal_keys_are_an_exact_dictionary(form: str, gate: str) -> None:
    """16 keys are written, then all again with other values: each leads to its last value."""
    keys = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q
    order = torch.cat((torch.arange(16), torch.randperm(16)))
    values = torch.randn(32, 5, dtype=torch.float64)
    inputs = random_inputs(gate, 1, 80, 1, 16, 5)
    inputs |= {"state": None, "beta": torch.ones(1, 80, 1).double(), "g": torch.zeros_like(inputs["g"])}
    inputs["k"] = F.pad(keys[order], (0, 0, 0, 48)).view(1, 80, 1, 16)  # a key of zeros writes nothing
    inputs["v"] = F.pad(values, (0, 0, 0, 48)).view(1, 80, 1, 5)
    inputs["q"] = keys.repeat(5, 1).view(1, 80, 1, 16)
    y, state = run(form, inputs)
    newest = values[16:][order[16:].argsort()]
    assert_close(y[0, :16, 0], values[:16])
    assert_close(y[0, 32:48, 0], newest)
    assert_close(state[0, 0], keys.T @ newest)


@GATES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_without_steps_the_state_decays(form: str, gate: str) -> None:
    inputs = random_inputs(gate)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    q, _, v, _, g, state = inputs.values()
    left = g.cumsum(1).exp().unsqueeze(4) * state.unsqueeze(1)
    y, last = run(form, inputs)
    assert_close(y, (q.unsqueeze(4) * left).sum(3))
    assert_close(last, left[:, -1])
    decayed = gla_scan(GLAInputs(q, inputs["k"], torch.zeros_like(v), g.expand_as(q), state))
    assert_close((y, last), decayed)


@GATES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_orthogonal_keys_only_add(form: str, gate: str) -> None:
    """They find nothing, so this is gated linear attention with values beta v."""
    inputs = random_inputs(gate, key=12)
    inputs["k"] = torch.linalg.qr(torch.randn(2, 2, 12, 11, dtype=torch.float64)).Q.permute(0, 3, 1, 2)
    inputs["g"] = inputs["g"][..., :1].expand_as(inputs["g"])  # the same for all channels: keys stay orthogonal
    inputs["state"] = None
    q, k, v, beta, g, _ = inputs.values()
    expected = gla_scan(GLAInputs(q, k, beta.unsqueeze(3) * v, g.expand_as(q), None))
    assert_close(run(form, inputs), expected)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_equal_decays_of_all_channels_are_one_of_the_head(form: str, documents: Tensor | None) -> None:
    by_head = random_inputs("head")
    by_channel = by_head | {"g": by_head["g"].detach().expand_as(by_head["k"]).clone().requires_grad_()}
    expected, found = (everything(form, inputs, documents) for inputs in (by_head, by_channel))
    found["g"] = found["g"].sum(-1, keepdim=True)
    assert_close(found, expected)


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_forget_all_see_themselves(form: str, gate: str) -> None:
    inputs = random_inputs(gate, length=80)
    inputs["g"] = torch.full_like(inputs["g"], -1e4)
    y, last = run(form, inputs)
    u = inputs["beta"].unsqueeze(3) * inputs["v"]
    assert_close(y, (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * u)
    assert_close(last, inputs["k"][:, -1].unsqueeze(3) * u[:, -1].unsqueeze(2))


@GATES
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_the_slopes(form: str, documents: Tensor | None, gate: str) -> None:
    inputs = random_inputs(gate, heads=1, key=2, value=3)

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run(form, dict(zip(inputs, tensors, strict=True)), documents)

    assert torch.autograd.gradcheck(outputs, list(inputs.values()), fast_mode=True)


EVERY = [pytest.param(n, marks=() if n in (1, 2, 16, 17, 64, 65, 150) else pytest.mark.slow) for n in range(1, 151)]


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize("length", EVERY)
def test_every_length_has_the_references_outputs_and_gradients(length: int, form: str, gate: str) -> None:
    """In float64, with documents of two to thirty tokens."""
    inputs = random_inputs(gate, length=length)
    documents = torch.randint(1, 8, (2, length)).eq(1).cumsum(1)
    found, exact = (everything(each, inputs, documents) for each in (form, "reference"))
    for name, expected in exact.items():
        assert_close(found[name], expected, rtol=1e-10, atol=1e-10)


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize("documents", [None, [60, 4, 66]], ids=str)
def test_the_fast_forms_equal_the_reference_in_fp32(form: str, documents: list[int] | None, gate: str) -> None:
    index = None if documents is None else torch.arange(5, 8).repeat_interleave(torch.tensor(documents)).expand(2, -1)
    inputs = random_inputs(gate, length=130, key=32, value=64, dtype=torch.float32)
    exact_inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    found, exact = everything(form, inputs, index), everything("reference", exact_inputs, index)
    for name, expected in exact.items():
        assert_close(found[name].double(), expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
@pytest.mark.parametrize("strength", [-8.0, -80.0])
def test_strong_decays_neither_overflow_nor_blur_the_weak_ones(strength: float, form: str, gate: str) -> None:
    """Some keys forget e^8 (or all) at every token, or at one in five, and some little; or a head does now and then."""
    inputs = random_inputs(gate, rows=1, length=256, key=4, dtype=torch.float32)
    with torch.no_grad():
        inputs["g"].fill_(-1e-3)
        if gate == "channel":
            inputs["g"][..., 0] = strength
        inputs["g"][:, 3::5, :, -1] = strength
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    found, expected = everything(form, inputs), everything("reference", exact)
    for name, theirs in expected.items():
        assert (found[name].double() - theirs).norm() <= 5e-6 * theirs.norm(), name


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
def test_one_key_again_and_again(form: str, gate: str) -> None:
    """The triangle is as full as it can be, and steps of 2 turn a value over: what rounding adds grows by its size."""
    inputs = random_inputs(gate, rows=1, length=256, key=16, dtype=torch.float32)
    with torch.no_grad():
        inputs["k"].copy_(inputs["k"][:, :1].expand_as(inputs["k"]))
        inputs["beta"].fill_(2)
        inputs["g"].fill_(-1e-3)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    found, expected = everything(form, inputs), everything("reference", exact)
    for name, theirs in expected.items():
        assert (found[name].double() - theirs).norm() <= 5e-4 * theirs.norm(), name


@GATES
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_cut_anywhere_and_carried_on_is_whole(form: str, documents: Tensor | None, gate: str) -> None:
    inputs = random_inputs(gate)
    whole, last = run(form, inputs, documents)
    expected = gradients(some_loss(whole, last), inputs)
    for cut in range(1, 11):
        if documents is not None and cut in (4, 9):
            continue  # a state that is handed over belongs to the next row's first document: here it would not
        before, after = (None, None) if documents is None else (documents[:, :cut], documents[:, cut:])
        first, state = run(form, tokens_of(inputs, slice(cut), inputs["state"]), before)
        second, state = run(form, tokens_of(inputs, slice(cut, None), state), after)
        assert_close(torch.cat([first, second], dim=1), whole)
        assert_close(state, last)
        assert_close(gradients(some_loss(torch.cat([first, second], dim=1), state), inputs), expected)


@GATES
@pytest.mark.parametrize("border", [70, 128], ids=["inside a chunk", "between chunks"])
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_of_a_document_leaks_into_the_next(form: str, border: int, gate: str) -> None:
    length = 200
    documents = (torch.arange(length) >= border).int().expand(2, -1)
    inputs = random_inputs(gate, length=length, dtype=torch.float32)
    probed = []
    for factor in (1.0, 0.7):
        changed = {
            name: torch.cat([factor * inputs[name][:, :border], inputs[name][:, border:]], dim=1)
            .detach()
            .requires_grad_()
            for name in PER_TOKEN
        }
        changed["state"] = (30 * factor * inputs["state"]).detach().requires_grad_()
        y, last = run(form, changed, documents)
        grads = gradients(some_loss(y[:, border:], last), changed)
        assert not grads["state"].any()
        assert not any(grads[name][:, :border].any() for name in PER_TOKEN)
        probed.append([y[:, border:], last, *grads.values()])
    assert all(torch.equal(one, other) for one, other in zip(*probed, strict=True))


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_what_comes_later_changes_no_bit_before(form: str, gate: str) -> None:
    inputs = random_inputs(gate, length=100, dtype=torch.float32)
    y, _ = run(form, inputs)
    for place in (1, 17, 64, 99):
        changed = {
            name: tensor if name == "state" else torch.cat([tensor[:, :place], 0.7 * tensor[:, place:]], dim=1)
            for name, tensor in inputs.items()
        }
        assert torch.equal(run(form, changed)[0][:, :place], y[:, :place])


@GATES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_an_infinite_state_stays_in_its_document(form: str, gate: str) -> None:
    inputs = random_inputs(gate)
    fresh = run(form, inputs, TWO_DOCUMENTS)
    infinite = inputs | {"state": torch.full_like(inputs["state"], torch.inf).requires_grad_()}
    y, last = run(form, infinite, TWO_DOCUMENTS)
    for row, border in enumerate((4, 9)):
        assert not y[row, :border].isfinite().any()
        assert torch.equal(y[row, border:], fresh[0][row, border:])
    assert torch.equal(last, fresh[1])


@GATES
@pytest.mark.parametrize("form", FORMS)
def test_bf16_inputs_are_computed_in_fp32(form: str, gate: str) -> None:
    inputs = random_inputs(gate, length=100, dtype=torch.bfloat16)
    y, last = run(form, inputs)
    exact_y, exact_last = run("reference", {name: tensor.double() for name, tensor in inputs.items()})
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    assert_close(last.double(), exact_last, rtol=1e-5, atol=1e-5)
    assert_close(y.double(), exact_y, rtol=2**-7, atol=2**-7)
    grads = gradients(some_loss(y, last), inputs)
    assert {name: grad.dtype for name, grad in grads.items()} == {name: t.dtype for name, t in inputs.items()}


@GATES
@pytest.mark.parametrize("form", FAST_FORMS)
def test_autocast_does_not_lower_the_precision(form: str, gate: str) -> None:
    inputs = random_inputs(gate, length=100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run(form, inputs)
    assert torch.equal(y, run(form, inputs)[0])


@GATES
def test_backward_keeps_no_state_of_every_token(gate: str) -> None:
    rows, length, heads, key, value = 2, 512, 2, 16, 16
    inputs = random_inputs(gate, rows, length, heads, key, value, torch.float32)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        run("chunked", inputs)
    own = {t.data_ptr() for t in inputs.values()}
    beyond_inputs = sum(t.numel() for address, t in kept.items() if address not in own)
    assert 0 < beyond_inputs <= rows * length * heads * key * value / chunked.CHUNK
