"""The compiled forms against the references in float64: sizes that fill no vector, types, layouts, threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.gated_norm import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    gated_norm,
    gated_scale,
    gated_squares,
)
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.registry import OPS
from hybridtron.ops.rope import RopeInputs, apply_rope
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.softmax import SoftmaxGradientsInputs, SoftmaxSumsInputs, softmax_gradients, softmax_sums
from hybridtron.ops.ssd import DecayInputs, SSDInputs, decay_scan, ssd_scan
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu

MODULES = ("conv.native", "gated_norm.native", "native.attention", "native.recurrence", "norm.native", "rope.native")
MODULES += ("softmax.native", "swiglu.native")
PER_TOKEN = {"x_BLE", "dt_BLE", "B_BLN", "C_BLN", "z_BLE", "x_BLHP", "dt_BLH", "B_BLGN", "C_BLGN", "x_BLC", "tail_BTC"}
PER_TOKEN |= {"y_BLHP", "z_BLHP", "x_BLHK", "q_BLHK", "k_BLGK", "v_BLGK", "q_BLHN", "k_BLHN", "v_BLHP"}
Case = Callable[[int, int, int], tuple[Op, Any]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def borders(rows: int, length: int) -> Tensor:
    """Documents that begin at the first tokens, in the middle, and at the last token, in each row at another place."""
    begins = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        for place in (1 + row, length // 2, 64, length - 1):
            if 0 < place < length:
                begins[row, place] = 1
    return begins.cumsum(1)


def scan(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    x, dt, z = normal(3, rows, length, channels)
    B, C = normal(2, rows, length, 9)
    A = -normal(channels, 9).exp()
    D = normal(channels)
    bias = normal(channels) - 2
    state = normal(rows, channels, 9)
    return selective_scan, ScanInputs(x, dt, A, B, C, D, bias, z, state, borders(rows, length))


def bare_scan(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    return selective_scan, scan(rows, length, channels)[1]._replace(z_BLE=None, state_BEN=None, documents_BL=None)


def ssd(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    heads = 6
    groups = 2
    head = -(-channels // heads)
    x = normal(rows, length, heads, head)
    dt = normal(rows, length, heads)
    B, C = normal(2, rows, length, groups, 11)
    A = -normal(heads).exp()
    D = normal(heads)
    bias = normal(heads) - 2
    state = normal(rows, heads, head, 11)
    return ssd_scan, SSDInputs(x, dt, A, B, C, D, bias, state, borders(rows, length))


def ssd_of_one_group(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """Eight heads in units of several, that share B and C; short documents, and states as wide as vectors."""
    x = normal(rows, length, 8, channels)
    dt = normal(rows, length, 8)
    B, C = normal(2, rows, length, 1, 32)
    A = -normal(8).exp()
    D = normal(8)
    bias = normal(8) - 2
    state = normal(rows, 8, channels, 32)
    documents = (torch.arange(length) // 7).repeat(rows, 1)
    return ssd_scan, SSDInputs(x, dt, A, B, C, D, bias, state, documents)


def decay(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    q = normal(2, rows, length, 3, 11)[0]
    k = normal(rows, length, 3, 11)
    v = normal(rows, length, 6, -(-channels // 6))
    g = -normal(rows, length, 6).exp()
    state = normal(rows, 6, v.shape[3], 11)
    return decay_scan, DecayInputs(q, k, v, g, state, borders(rows, length))


def gla(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """Keys that fill no vector, or many."""
    heads = 3
    values = -(-channels // 3)
    q = normal(rows, length, heads, channels)
    k = normal(rows, length, heads, channels)
    v = normal(rows, length, heads, values)
    g = -normal(rows, length, heads, channels).exp()
    state = normal(rows, heads, channels, values)
    return gla_scan, GLAInputs(q, k, v, g, state, borders(rows, length))


def delta(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """Return inputs with one decay a head, keys of length 1, and steps of up to 2."""
    q = normal(rows, length, 3, 11)
    k = normal(rows, length, 3, 11)
    v = normal(rows, length, 3, channels)
    beta = 2 * torch.rand(rows, length, 3, dtype=torch.float64)
    g = -normal(rows, length, 3, 1).exp()
    state = normal(rows, 3, 11, channels)
    return delta_scan, DeltaInputs(q, F.normalize(k, dim=-1), v, beta, g, state, borders(rows, length))


def delta_by_channel(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """A decay a key channel, keys as wide as vectors, and short documents."""
    q = normal(rows, length, 2, 32)
    k = normal(rows, length, 2, 32)
    v = normal(rows, length, 2, channels)
    beta = 2 * torch.rand(rows, length, 2, dtype=torch.float64)
    g = -normal(rows, length, 2, 32).exp()
    documents = (torch.arange(length) // 47).repeat(rows, 1)
    return delta_scan, DeltaInputs(q, F.normalize(k, dim=-1), v, beta, g, normal(rows, 2, 32, channels), documents)


def conv(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    x = normal(rows, length, channels)
    tail = normal(rows, 3, channels)
    return causal_conv, ConvInputs(x, normal(channels, 4), normal(channels), tail, borders(rows, length), True)


def wide_conv(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    return causal_conv, ConvInputs(normal(rows, length, channels), normal(channels, 9), None, None, None, False)


def norm(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    x = normal(rows, length, channels + 1)  # of one channel alone the gradient is a difference that fp32 has lost
    return rms_norm, RMSNormInputs(x, normal(channels + 1), 1e-5)


def add_norm(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    x, added = normal(2, rows, length, channels + 1)
    return add_rms_norm, AddRMSNormInputs(x, added, normal(channels + 1), 1e-5)


def gate(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    return swiglu, SwiGLUInputs(normal(rows, length, 2 * channels))


def gated(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """Return inputs with at least two groups of three channels: the gradient of a group of one cancels."""
    y, z = normal(2, rows, length, 4 * channels + 2)
    return gated_norm, GatedNormInputs(y, z, normal(4 * channels + 2), 2, 1e-5)


def squares(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    return gated_squares, GatedSquaresInputs(*normal(2, rows, length, 3, channels))


def scale(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    y, z = normal(2, rows, length, 3, channels)
    return gated_scale, GatedScaleInputs(y, z, normal(rows, length, 3).exp(), normal(3, channels))


def window(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    q = normal(rows, length, 6, channels)
    k = normal(rows, length, 2, channels)
    v = normal(rows, length, 2, channels)
    return attention, AttentionInputs(q, k, v, 50, borders(rows, length))


def full(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    return attention, AttentionInputs(*normal(3, rows, length, 2, channels))


def one_token(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """A query over remembered keys, as in decoding; two heads share theirs, and rows remember unequally much."""
    q = normal(rows, 1, 4, channels)
    k = normal(rows, 1, 2, channels)
    v = normal(rows, 1, 2, channels)
    before = AttentionMemory(*normal(2, rows, length, 2, channels), (length - torch.arange(rows)).clamp(min=1))
    return attention, AttentionInputs(q, k, v, None, None, before)


def rotation(rows: int, length: int, channels: int) -> tuple[Op, Any]:
    """Return inputs where two channels of a head are not rotated."""
    angles = normal(rows, length, channels).float()
    return apply_rope, RopeInputs(normal(rows, length, 3, 2 * channels + 2), angles.cos(), angles.sin())


FORMS = (scan, bare_scan, ssd, ssd_of_one_group, decay, gla, delta, delta_by_channel, conv, wide_conv, norm, add_norm)
FORMS += (gate, gated, squares, scale, window, full)
CASES = pytest.mark.parametrize("case", [*FORMS, one_token, rotation])


def typed(inputs: Any, dtype: torch.dtype) -> Any:
    """Tokens in a type, parameters and states in at least fp32; all want gradients."""
    wide = torch.promote_types(dtype, torch.float32)
    tokens = PER_TOKEN | {"x", "added", "gate_up"}
    kinds = {name: dtype if name in tokens else wide for name in inputs._fields}
    tensors = {
        name: value.detach().to(kinds[name]).requires_grad_(not name.endswith("_BLk"))  # angles have none
        for name, value in inputs._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    if getattr(inputs, "memory", None) is not None:
        keys, values, length_B = inputs.memory
        tensors["memory"] = AttentionMemory(keys.to(dtype), values.to(dtype), length_B)
    return inputs._replace(**tensors)


def computed(op: Op, form: str, inputs: Any) -> dict[str, Tensor]:
    """Outputs and gradients by name, each output with weights of its own."""
    with force(form):
        outputs = op(inputs)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    wanted = {name: value for name, value in inputs._asdict().items() if getattr(value, "requires_grad", False)}
    weights = [torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype) for y in outputs]
    grads = torch.autograd.grad(outputs, [*wanted.values()], weights)
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | dict(zip(wanted, grads, strict=True))


def errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each, over the largest value."""
    return {
        name: ((actual[name].double() - value).abs().max() / value.abs().max().clamp(min=1e-30)).item()
        for name, value in exact.items()
    }


@CASES
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 64, 17), (3, 65, 130), (2, 131, 33)], ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
def test_compiled_forms_equal_the_references(
    case: Case, sizes: tuple[int, int, int], dtype: torch.dtype, close: float
) -> None:
    op, inputs = case(*sizes)
    inputs = typed(inputs, dtype)
    exact = computed(op, "reference", typed(inputs, torch.float64))
    actual = computed(op, "native", inputs)
    assert {name: value for name, value in errors(actual, exact).items() if value > close} == {}
    assert all(actual[name].dtype == getattr(inputs, name).dtype for name in actual if not name.startswith("output"))


@CASES
def test_compiled_forms_are_as_exact_in_fp32_as_the_forms_of_torch(case: Case) -> None:
    op, inputs = case(2, 200, 40)
    inputs = typed(inputs, torch.float32)
    exact = computed(op, "reference", typed(inputs, torch.float64))
    others = [form for form in (*op.implementations, op.reference) if form.name != "native"]
    fallback = next(form.name for form in others if not form.unavailable_reason("cpu"))
    ours, theirs = (errors(computed(op, form, inputs), exact) for form in ("native", fallback))
    assert {name: (value, theirs[name]) for name, value in ours.items() if value > 2 * theirs[name] + 3e-7} == {}


@CASES
@pytest.mark.parametrize("rows", [1, 4])
def test_bits_of_compiled_forms_do_not_depend_on_threads(
    case: Case, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, inputs = case(rows, 150, 300)
    inputs = typed(inputs, torch.float32)
    results = []
    for count in (1, 2, 3, 7, 1):
        for module in MODULES:
            monkeypatch.setattr(f"hybridtron.ops.{module}.threads", lambda worth, count=count: count)
        results.append(computed(op, "native", inputs))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


@CASES
def test_compiled_forms_accept_any_memory_layout(case: Case) -> None:
    """Use a mixer's layouts: sequence first in memory, and parts of wider projections."""
    op, inputs = case(3, 20, 24)
    inputs = typed(inputs, torch.float32)

    def moved(value: Any, name: str) -> Any:
        if (
            not isinstance(value, Tensor)
            or value.dim() < 3
            or name in ("A_EN", "state_BEN", "state_BHPN", "state_BHNP")
        ):
            return value
        wide = value
        if value.dim() == 3:
            wide = torch.cat((value, value), dim=-1)
        turned = wide.detach().transpose(0, 1).contiguous().transpose(0, 1)[..., : value.shape[-1]]
        return turned.requires_grad_(value.requires_grad)

    other = inputs._replace(**{name: moved(value, name) for name, value in inputs._asdict().items()})
    reordered = computed(op, "native", other)
    expected = computed(op, "native", inputs)
    assert all(torch.equal(reordered[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [1, 15, 16, 100])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_compiled_softmax_equals_the_reference(size: int, z_loss: float, dtype: torch.dtype, close: float) -> None:
    logits = (5 * normal(9, size)).to(dtype)
    logits[0, 0] = 0.0
    if size > 1:
        logits[0, 0] = -torch.inf
    labels = torch.randint(size, (9,))
    # not here
    labels[1] = -100
    labels[2] = size + 3
    mask = torch.arange(9) != 5
    logits[5] = torch.nan
    sums = softmax_sums.named("native").function(SoftmaxSumsInputs(logits, labels))
    exact = softmax_sums.reference.function(SoftmaxSumsInputs(logits.double(), labels))
    real = mask.nonzero().squeeze()
    for ours, theirs in zip(sums, exact, strict=True):
        torch.testing.assert_close(ours[real].double(), theirs[real], rtol=close, atol=close)
    lse = exact.greatest_C + exact.sum_C.log()
    inputs = SoftmaxGradientsInputs(logits.clone(), labels, mask, lse.to(sums.sum_C.dtype), z_loss)
    actual = softmax_gradients.named("native").function(inputs)
    expected = softmax_gradients.reference.function(inputs._replace(logits_CV=logits.double(), lse_C=lse))
    torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close)


def test_values_that_are_not_finite_stay_so() -> None:
    """NaN and infinity reach the loss, so that the step is refused."""
    for value in (torch.nan, torch.inf):
        op, inputs = scan(1, 5, 3)
        x = inputs.x_BLE.float()
        x[0, 2, 1] = value
        with force(selective_scan="native"):
            y, last = op(typed(inputs, torch.float32)._replace(x_BLE=x, documents_BL=None))
        assert not y[0, 2:, 1].isfinite().any()
        assert not last[0, 1].isfinite().any()
        assert y[0, :, [0, 2]].isfinite().all()
    y = rms_norm.named("native").function(RMSNormInputs(torch.tensor([[[1.0, torch.nan]]]), torch.ones(2), 1e-5))
    assert y.isnan().all()
    sums = softmax_sums.named("native").function(
        SoftmaxSumsInputs(torch.tensor([[1.0, torch.nan], [torch.nan, 0.0], [torch.inf, 0.0]]), torch.zeros(3).long())
    )
    assert not sums.sum_C.isfinite().any()


def test_every_op_of_the_laptop_recipes_runs_compiled_on_a_cpu() -> None:
    """No fallback in the table that a run on a CPU begins with."""
    compiled = {name for name, op in OPS.items() if op.choice("cpu")[0] == "native"}
    assert compiled == {
        "selective_scan", "ssd_scan", "decay_scan", "gla_scan", "delta_scan", "causal_conv", "rms_norm", "add_rms_norm",
        "gated_norm", "gated_squares", "gated_scale", "swiglu", "softmax_sums", "softmax_gradients", "attention",
        "apply_rope", "span_attention", "turn_pairs", "angles", "activated_again", "expert_choice", "expert_order",
        "to_experts", "from_experts",
    }  # fmt: skip
