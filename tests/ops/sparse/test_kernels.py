"""The Triton kernels of sparse attention against the dense reference in float64: outputs and every gradient.

Without CUDA they run in Triton's interpreter, on short rows cut into small tiles.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.sparse import (
    Budget,
    Seen,
    SparseInputs,
    SparseKeys,
    SparseMemory,
    joined,
    remember,
    sparse_attention,
)
from hybridtron.ops.sparse.triton import BEST, FP32_SIZE, SIZE
from tests.ops.compiling import compile_calls
from tests.ops.sparse.test_sparse import PATTERNS, bins_of, emptied, places_of, random_row, slots_of

pytestmark = pytest.mark.usefixtures("interpreter")

slow = partial(pytest.param, marks=pytest.mark.slow)
FORM = "triton"
TOLERANCE = 2e-6  # of a tensor's norm, for fp32
RULES = {name: budget for name, budget in PATTERNS.items() if name != "all"}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 queries and keys, and slices of 16 values."""
    if compute_device().type == "cpu":
        from hybridtron.ops.sparse import kernels  # not above: its file is imported again for the interpreter

        monkeypatch.setattr(kernels, "tiles", lambda *_: kernels.PairTiles(16, 16, 16))


def inputs_of(
    budget: Budget, length: int, remembered: int = 0, borders: float = 0.0, values: int = 3, ties: bool = False
) -> SparseInputs:
    """Return float64 inputs with fp32's digits, after `remembered` tokens; a mixer's memory keeps some of these."""
    row = random_row(remembered + length, 2, borders, ties)
    row = row._replace(v_RLP=torch.randn(2, remembered + length, values, dtype=torch.float64))
    q, k, v, scores = (x.detach().float().double() for x in row[:4])
    before, new = (
        SparseKeys(
            k[:, i],
            v[:, i],
            row.documents_RL[:, i],
            places_of(row.documents_RL[:, i]),
            scores[:, i] if budget.best else None,
        )
        for i in (slice(remembered), slice(remembered, None))
    )
    memory = None
    if remembered:
        bins = bins_of(before.keys_RSN, before.documents_RS, budget)
        continues = row.documents_RL[:, remembered] == row.documents_RL[:, remembered - 1]
        kept = remember(budget, before, bins, slots_of(budget))
        memory = SparseMemory(*(None if x is None else emptied(x, continues) for x in kept))
    at_hand = joined(memory, new)
    q = q[:, remembered:]
    query_bins = bins_of(q, new.documents_RS, budget)
    key_bins = bins_of(at_hand.keys_RSN, at_hand.documents_RS, budget)
    seen = Seen(budget, at_hand.documents_RS, at_hand.places_RS, query_bins, key_bins, at_hand.scores_RS)
    return SparseInputs(q, at_hand.keys_RSN, at_hand.values_RSP, seen)


def computed(form: str, inputs: SparseInputs, dtype: torch.dtype) -> list[Tensor]:
    """Return y, and the gradients of a random weighted sum over it."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs[:3])
    with force(sparse_attention=form):
        y = sparse_attention(SparseInputs(q, k, v, inputs.seen))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, (q, k, v), weights.to(y))]


def assert_near_reference(inputs: SparseInputs, dtype: torch.dtype = torch.float32, most: float = TOLERANCE) -> None:
    rounded = SparseInputs(*(x.to(dtype).double() for x in inputs[:3]), inputs.seen)
    expected = computed("reference", rounded, torch.float64)
    results = computed(FORM, inputs, dtype)
    for name, ours, theirs in zip(("y", "dq", "dk", "dv"), results, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= most * theirs.norm().clamp(min=10), name


@pytest.mark.parametrize("case", [(37, 0, 0.1, False), slow((33, 0, 0.0, True)), slow((70, 0, 0.03, True))], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_triton_sparse_attention_equals_the_reference_for_every_rule(
    name: str, case: tuple[int, int, float, bool]
) -> None:
    """Rows of whole tiles and ragged ones, documents, ties of scores."""
    length, remembered, borders, ties = case
    assert_near_reference(inputs_of(RULES[name], length, remembered, borders, ties=ties))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", [(20, 25, 0.0), slow((1, 40, 0.0)), slow((16, 50, 0.05))], ids=str)
def test_triton_sparse_attention_equals_the_reference_with_a_memory(name: str, case: tuple[int, int, float]) -> None:
    length, remembered, borders = case
    assert_near_reference(inputs_of(RULES[name], length, remembered, borders))


@pytest.mark.parametrize("most", [1, slow(8), slow(40)])
@pytest.mark.parametrize("name", ["ks", "hax"])
def test_triton_sparse_attention_accepts_budgets_of_any_size(name: str, most: int) -> None:
    budget = RULES[name]._replace(**{rule: most for rule in ("bin", "best") if getattr(RULES[name], rule)})
    assert_near_reference(inputs_of(budget, 35, 0, 0.05, values=20, ties=True))


def test_query_without_visible_keys_has_zero_output_and_gradient() -> None:
    y, of_q, *others = computed(FORM, inputs_of(Budget(strided=4, stride=18), 30), torch.float32)
    assert not y[:, :17].any()
    assert not of_q[:, :17].any()
    assert y[:, 17:].all()
    assert all(grad.isfinite().all() for grad in others)


def test_fp16_inputs_are_summed_in_fp32() -> None:
    assert_near_reference(inputs_of(RULES["hax"], 30, 0, 0.1), torch.float16, 2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_repeated_calls_give_equal_bits_and_documents_stay_apart(name: str) -> None:
    torch.manual_seed(3)
    inputs = inputs_of(RULES[name], 40)
    documents = (torch.arange(40) >= 21).long().expand(2, -1).contiguous()
    seen = inputs.seen._replace(documents_RS=documents, places_RS=places_of(documents))
    results = []
    for factor in (1.0, 1.0, 3.0):
        q, k, v = (torch.cat((x[:, :21] * factor, x[:, 21:]), 1) for x in inputs[:3])
        results.append(computed(FORM, SparseInputs(q, k, v, seen), torch.float32))
    first, again, other = results
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a[:, 21:], b[:, 21:]) for a, b in zip(first, other, strict=True))


def test_triton_sparse_attention_refuses_unsupported_inputs() -> None:
    form = sparse_attention.named(FORM)
    inputs = inputs_of(RULES["hax"], 3)
    narrow = SparseInputs(*(x.float() for x in inputs[:3]), inputs.seen)
    assert form.device == "cuda"
    assert form.unsupported_reason(narrow) is None
    assert "float64" in form.unsupported_reason(inputs)
    wide = narrow._replace(q_RLN=torch.zeros(2, 3, SIZE + 1))
    assert f"{SIZE + 1} channels" in form.unsupported_reason(wide)
    wide = narrow._replace(q_RLN=torch.zeros(2, 3, FP32_SIZE + 1))
    assert "fp32" in form.unsupported_reason(wide)
    assert form.unsupported_reason(SparseInputs(*(x.bfloat16() for x in wide[:3]), inputs.seen)) is None
    for budget, said in ((Budget(best=BEST + 1), f"{BEST + 1} keys"), (PATTERNS["all"], "5 rules")):
        assert said in form.unsupported_reason(narrow._replace(seen=inputs.seen._replace(budget=budget)))


def shipped() -> None:
    """Forward and backward of every rule at the sizes of the paper's models and at the largest that are taken."""
    for dtype, size, values in (
        (torch.bfloat16, 64, 1536),
        (torch.bfloat16, SIZE, 4096),
        (torch.float16, 16, 1536),
        (torch.float32, FP32_SIZE, 1536),
    ):
        for budget in (Budget(bin=64, best=64), Budget(recent=64, strided=64, stride=32)):
            with torch.device("meta"):
                q = torch.empty(8, 8192, size, dtype=dtype, requires_grad=True)
                k = torch.empty(8, 8192, size, dtype=dtype, requires_grad=True)
                v = torch.empty(8, 8192, values, dtype=dtype, requires_grad=True)
                whole = torch.zeros(8, 8192, dtype=torch.int64)
                seen = Seen(budget, whole, whole)
                if budget.bin:
                    seen = seen._replace(query_bins_RL=whole, key_bins_RS=whole)
                if budget.best:
                    seen = seen._replace(scores_RS=torch.empty(8, 8192))
            y = sparse_attention.named(FORM).function(SparseInputs(q, k, v, seen))
            torch.autograd.backward(y, torch.empty_like(y))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {
        "best_keys", "attend", "along_outputs", "query_gradients", "key_gradients", "value_gradients",
    }  # fmt: skip
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    assert max(buffers) <= 8 * 8192 * 4096  # no matrix of pairs, and no values gathered for each query


@pytest.mark.gpu
@pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("name", RULES)
def test_triton_sparse_attention_equals_the_reference_on_a_gpu(name: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs = inputs_of(RULES[name], 300, 100, 0.01, values=200, ties=True)
    device = compute_device()
    seen = Seen(inputs.seen.budget, *(None if x is None else x.to(device) for x in inputs.seen[1:]))
    assert_near_reference(SparseInputs(*(x.to(device) for x in inputs[:3]), seen), dtype, tolerance)
