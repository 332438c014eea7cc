"""Attention: the reference against loops and transformers, every other form against the reference.

The blocked form runs with blocks of 4 queries, so that short rows have many of them.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hybridtron.device import Package, optional_package
from hybridtron.ops import dispatch
from hybridtron.ops.attention import (
    AttentionInputs,
    AttentionMemory,
    attention,
    blocked,
    flash_attn,
    remember,
    table,
    torch_kernels,
)
from hybridtron.ops.attention.flash_attn import PACKAGE
from hybridtron.ops.dispatch import force
from hybridtron.ops.documents import document_boundaries

CPU_FORMS = pytest.mark.parametrize("form", ["reference", "blocked", "native"])
FAST_FORMS = pytest.mark.parametrize("form", ["blocked", "native"])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 3 + [2] * 6, [0] * 1 + [1] * 15 + [2] * 2])


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 4)


def random_inputs(
    length: int = 18, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> AttentionInputs:
    """Queries, keys and values of two rows, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, count, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in (heads, groups, groups)
    )
    return AttentionInputs(q, k, v)


def memory_of(lengths: tuple[int, int], groups: int = 2, size: int = 7) -> AttentionMemory:
    """Return a memory of `size` entries. Its padding holds random numbers, so that their use would be noticed."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, size, groups, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return AttentionMemory(keys.requires_grad_(), values.requires_grad_(), torch.tensor(lengths))


def run(form: str, inputs: AttentionInputs) -> list[Tensor]:
    """Return the output, and the gradients of all input tensors, remembered ones among them."""
    with force(form):
        y = attention(inputs)
    leaves = list(inputs[:3])
    if inputs.memory is not None:
        leaves += inputs.memory[:2]
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves)]


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@CPU_FORMS
@WINDOWS
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("lengths", [None, (0, 5)])
def test_queries_attend_to_the_visible_keys_alone(
    form: str, window: int | None, documents: Tensor | None, lengths: tuple[int, int] | None
) -> None:
    """Equal scores and one-hot values make the output show the seen tokens, which loops count."""
    length = 18
    size = 0
    if lengths:
        size = 7
    marks = torch.eye(size + length, dtype=torch.float64).expand(2, -1, -1)[:, :, None]
    q = torch.zeros(2, length, 1, size + length, dtype=torch.float64)
    memory = None
    if lengths:
        memory = AttentionMemory(0 * marks[:, :size], marks[:, :size], torch.tensor(lengths))
    with force(form):
        y = attention(AttentionInputs(q, q, marks[:, size:], window, documents, memory))
    for row, i, j in itertools.product(range(2), range(length), range(-size, length)):
        document = [0] * length
        if documents is not None:
            document = DOCUMENTS[row].tolist()
        known = document[max(j, 0)] == document[i] and (lengths is None or j >= -lengths[row])
        sees = j <= i and known and (window is None or i - j < window)
        assert (y[row, i, 0, size + j] > 0) == sees, (row, i, j)


@pytest.mark.parametrize("window", [None, 3])
def test_reference_equals_transformers(window: int | None) -> None:
    q, k, v = random_inputs()[:3]
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    places = torch.arange(18)
    mask = torch.stack([torch.stack([torch.as_tensor(rule(0, 0, i, j)) for j in places]) for i in places])
    module = nn.Module()
    module.num_key_value_groups = 2
    module.is_causal = True
    expected, _ = sdpa_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), mask[None, None])
    torch.testing.assert_close(attention.reference.function(AttentionInputs(q, k, v, window, None, None)), expected)


@FAST_FORMS
@WINDOWS
@pytest.mark.parametrize("length", [4, 18])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("lengths", [None, (0, 5)])
def test_fast_forms_equal_the_reference(
    form: str,
    window: int | None,
    length: int,
    heads: int,
    groups: int,
    documents: Tensor | None,
    lengths: tuple[int, int] | None,
) -> None:
    inputs = random_inputs(length, heads, groups)._replace(window=window)
    if documents is not None:
        inputs = inputs._replace(documents_BL=documents[:, :length])
    if lengths:
        inputs = inputs._replace(memory=memory_of(lengths, groups))
    assert_all_close(run(form, inputs), run("reference", inputs))


@FAST_FORMS
def test_fast_forms_equal_the_reference_with_blocks_of_real_size(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    inputs = random_inputs(700)
    documents = (torch.arange(700) // torch.tensor([[330], [1000]])).long()
    for window, packed in ((300, None), (300, documents), (None, documents)):
        case = inputs._replace(window=window, documents_BL=packed)
        assert_all_close(run(form, case), run("reference", case), 1e-10)


@CPU_FORMS
@pytest.mark.parametrize(
    ("window", "documents", "lengths"), [(None, None, None), (3, None, None), (5, DOCUMENTS, (0, 2))]
)
def test_gradients_are_the_slopes(
    form: str, window: int | None, documents: Tensor | None, lengths: tuple[int, int] | None
) -> None:
    q, k, v = (x.detach()[:, :6, :, :2].requires_grad_() for x in random_inputs(heads=2, groups=1)[:3])
    memory = memory_of(lengths or (0, 0), 1)
    keys, values = (x.detach()[:, :3, :, :2].requires_grad_() for x in memory[:2])
    if documents is not None:
        documents = documents[:, :6]

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        remembered = None
        if lengths:
            remembered = AttentionMemory(keys, values, memory.length_B)
        return attention(AttentionInputs(q, k, v, window, documents, remembered))

    with force(form):
        assert gradcheck(function, (q, k, v, keys, values), fast_mode=True)


@CPU_FORMS
def test_bf16_is_near_the_reference_in_float64(form: str) -> None:
    inputs = random_inputs(dtype=torch.bfloat16)._replace(window=5, documents_BL=DOCUMENTS)
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    results = run(form, inputs)
    expected = run("reference", inputs._replace(q_BLHK=q, k_BLGK=k, v_BLGK=v))
    assert all(x.dtype == torch.bfloat16 for x in results)
    assert_all_close([x.double() for x in results], expected, 0.03)


@CPU_FORMS
@pytest.mark.parametrize("window", [None, 5])
def test_documents_of_a_row_equal_separate_rows(form: str, window: int | None) -> None:
    q, k, v = random_inputs()[:3]
    with force(form):
        y = attention(AttentionInputs(q, k, v, window, DOCUMENTS, None))
        for row, document in itertools.product(range(2), range(3)):
            tokens = DOCUMENTS[row] == document
            alone = attention(AttentionInputs(*(x[row, tokens][None] for x in (q, k, v)), window, None, None))
            torch.testing.assert_close(y[row, tokens], alone[0])


@CPU_FORMS
@pytest.mark.parametrize(("window", "keep"), [(None, None), (6, 5), (6, None), (1, 0)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_chunks_with_memory_equal_the_whole_row(
    form: str, window: int | None, keep: int | None, documents: Tensor | None
) -> None:
    inputs = random_inputs()._replace(window=window, documents_BL=documents)
    tensors = inputs[:3]
    memory = None
    parts = []
    start = 0
    with force(form):
        for stop in (1, 3, 9, 16, 18):
            q, k, v = (x[:, start:stop] for x in tensors)
            chunk = None if documents is None else documents[:, start:stop]
            if memory is not None and documents is not None:  # who hands over a memory empties it at a border
                continues = documents[:, start] == documents[:, start - 1]
                memory = memory._replace(length_B=memory.length_B * continues)
            parts.append(attention(AttentionInputs(q, k, v, window, chunk, memory)))
            memory = remember(memory, k, v, chunk, keep)
            start = stop
            assert keep is None or memory.keys_BMGK.shape[1] == keep
    y = torch.cat(parts, dim=1)
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), tensors)
    assert_all_close([y.detach(), *grads], run("reference", inputs))


def test_memory_holds_the_last_document_alone() -> None:
    _, k, v = random_inputs(length=3)[:3]
    old = memory_of((2, 5))
    documents = torch.tensor([[0, 0, 1], [0, 0, 0]])
    for keep, size, lengths in ((None, 10, [1, 8]), (4, 4, [1, 4]), (12, 12, [1, 8])):
        keys, _, length_B = remember(old, k, v, documents, keep)
        assert length_B.tolist() == lengths
        assert length_B.dtype == torch.int64
        everything = F.pad(torch.cat((old.keys_BMGK, k), dim=1), (0, 0, 0, 0, max(0, size - 10), 0))
        assert torch.equal(keys, everything[:, -size:])


@CPU_FORMS
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_memory", [False, True])
def test_documents_and_memories_leak_no_bit_into_the_next(form: str, window: int | None, with_memory: bool) -> None:
    """Other tokens in document 0 and in the memory: document 1's output and all gradients stay bit for bit."""
    documents = torch.tensor([[0] * 7 + [1] * 11])

    def probe(others: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(32, 12, requires_grad=True)
        x = torch.randn(1, 18, 12)
        x = torch.cat((others, x[:, 7:]), dim=1).requires_grad_()
        q, k, v = (x @ weight.T).view(1, 18, 4, 8).split((2, 1, 1), dim=2)
        memory = None
        if with_memory:
            memory = AttentionMemory(10 * q[:, :3, :1].detach(), v[:, :3].detach(), torch.tensor([3]))
        with force(form):
            y = attention(AttentionInputs(q, k, v, window, documents, memory))[:, 7:]
        x_grad, weight_grad = torch.autograd.grad(y.square().sum(), (x, weight))
        assert not x_grad[:, :7].any()
        return [y, x_grad, weight_grad]

    first = probe(torch.randn(1, 7, 12))
    second = probe(100 * torch.rand(1, 7, 12))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("window", "documents"), [(32, False), (32, True), (None, True)])
def test_memory_of_blocked_attention_grows_with_the_length_alone(window: int | None, documents: bool) -> None:
    """Memory saved for backward does not grow with the length's square."""
    length = 1024
    blocked.BLOCK = 32  # set back by the fixture
    inputs = random_inputs(length, 2, 1, torch.float32)._replace(window=window)
    if documents:
        inputs = inputs._replace(documents_BL=(torch.arange(length) // 900).expand(2, -1))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), force("blocked"):
        y = attention(inputs)
    assert y.requires_grad
    assert 0 < sum(kept.values()) < 2 * length * 4 * 150


def test_sdpa_equals_the_reference() -> None:
    inputs = random_inputs()
    assert_all_close(run("sdpa", inputs), run("reference", inputs))


def flash_emulation() -> ModuleType:
    """The two functions of flash_attn 2 and 3 that are used, as its README describes them."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int], deterministic: bool
    ) -> Tensor:
        left, right = window_size
        assert causal
        assert right == (0 if left >= 0 else -1)
        assert q.dim() == 4
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        mask = (distance >= 0) & ((distance <= left) | (left == -1))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        window_size: tuple[int, int],
        deterministic: bool,
    ) -> Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert q.dim() == 3
        sizes = cu_seqlens_q.diff()
        assert sizes.max() <= max_seqlen_q
        assert sizes.sum() == len(q)
        parts = zip(*(x[None].split(sizes.tolist(), dim=1) for x in (q, k, v)), strict=True)
        settings = {"causal": causal, "window_size": window_size, "deterministic": deterministic}
        return torch.cat([flash_attn_func(*part, **settings)[0] for part in parts])

    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def flash4_emulation() -> ModuleType:
    """Version 4 has None for a side without a limit, and gives the sums beside the output."""
    second = flash_emulation()
    fourth = ModuleType("interface")

    def adapted(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
        def call(*tensors: Tensor, window_size: tuple[int | None, int | None], **settings: Any) -> tuple[Tensor, None]:
            left, right = window_size
            assert right == (None if left is None else 0)
            sides = (-1, -1) if left is None else (left, 0)
            return function(*tensors, window_size=sides, **settings), None

        return call

    fourth.flash_attn_func = adapted(second.flash_attn_func)  # type: ignore[attr-defined]
    fourth.flash_attn_varlen_func = adapted(second.flash_attn_varlen_func)  # type: ignore[attr-defined]
    return fourth


EMULATIONS = {"flash-attn": flash_emulation, "flash-attn-3": flash_emulation, "flash-attn-4": flash4_emulation}


@WINDOWS
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("form", EMULATIONS)
def test_calls_of_flash_attention_equal_the_reference(
    form: str, window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package("flash_attn", EMULATIONS[form](), "emulated")
    monkeypatch.setattr(flash_attn, "optional_package", lambda name: package)
    inputs = random_inputs()._replace(window=window, documents_BL=documents)
    assert_all_close(run(form, inputs), run("reference", inputs))


def varlen_emulation() -> Callable[..., Tensor]:
    """torch's `varlen_attn`, as its documentation describes it, in causal use alone."""
    flash = flash_emulation().flash_attn_varlen_func

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        left, right = window_size
        assert right == 0
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return flash(
            query,
            key,
            value,
            cu_seqlens_q=cu_seq_q,
            cu_seqlens_k=cu_seq_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            causal=True,
            window_size=(-1, -1) if left < 0 else (left, 0),
            deterministic=False,
        )

    return varlen_attn


@WINDOWS
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3)])
def test_calls_of_varlen_attn_equal_the_reference(
    window: int | None, documents: Tensor | None, heads: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "_varlen_attn", varlen_emulation)
    inputs = random_inputs(heads=heads, groups=groups)._replace(window=window, documents_BL=documents)
    assert_all_close(run("varlen", inputs), run("reference", inputs))


def test_flash_attention_uses_known_document_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package("flash_attn", flash_emulation(), "emulated")
    monkeypatch.setattr(flash_attn, "optional_package", lambda name: package)
    q, k, v = random_inputs()[:3]
    with force("flash-attn"):
        looked = attention(AttentionInputs(q, k, v, 4, DOCUMENTS))
        monkeypatch.setattr(flash_attn, "document_boundaries", None)
        known = document_boundaries(DOCUMENTS)
        assert known.tolist() == [0, 9, 12, 18, 19, 34, 36]
        assert torch.equal(attention(AttentionInputs(q, k, v, 4, DOCUMENTS, None, known)), looked)


FLASH_2 = ["flash_attn/__init__.py", f"{PACKAGE.replace('.', '/')}.py"]
FLASH_4 = ["flash_attn/cute/__init__.py"]


@pytest.fixture
def _imports_are_forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("_imports_are_forgotten")
@pytest.mark.parametrize(("files", "chosen"), [(FLASH_2, "flash-attn"), (FLASH_4, "sdpa")])
def test_namespace_of_flash_attn_4_is_not_taken_for_flash_attn(
    files: list[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 makes `flash_attn` a namespace, in which none of the functions lie."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dispatch, "optional_package", optional_package.__wrapped__)
    monkeypatch.setattr(table, "compute_capability", lambda: (8, 0))
    assert attention.choice("cuda")[0] == chosen


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["cudnn", "varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_torch_equal_the_reference_on_a_gpu(form: str, window: int | None, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 700, heads, 64, generator=generator).cuda().bfloat16().requires_grad_() for heads in (4, 2, 2)
    )
    documents = (torch.arange(700) // torch.tensor([[330], [1000]])).cuda() if packed else None
    inputs = AttentionInputs(q, k, v, window, documents)
    implementation = attention.named(form)
    reason = implementation.unavailable_reason("cuda") or implementation.refusal(inputs)
    if reason is not None:
        pytest.skip(reason)
    expected = run("reference", inputs._replace(q_BLHK=q.float(), k_BLGK=k.float(), v_BLGK=v.float()))
    assert_all_close([x.float() for x in run(form, inputs)], [x.float() for x in expected], 0.04)
