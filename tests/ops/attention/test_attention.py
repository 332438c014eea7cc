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
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention, blocked, flash_attn, remember
from hybridtron.ops.attention.flash_attn import PACKAGE
from hybridtron.ops.dispatch import force
from hybridtron.ops.documents import document_boundaries
from hybridtron.planning.rates import GPU, GPUS

CPU_FORMS = pytest.mark.parametrize("form", ["reference", "blocked", "native"])
FAST_FORMS = pytest.mark.parametrize("form", ["blocked", "native"])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 3 + [2] * 6, [0] * 1 + [1] * 15 + [2] * 2])


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 4)


def inputs(length: int = 18, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v of two rows, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, count, 8) for count in (heads, groups, groups)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def memory_of(lengths: tuple[int, int], groups: int = 2, size: int = 7) -> AttentionMemory:
    """Return a memory of `size` entries. Its padding holds random numbers, so that their use would be noticed."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, size, groups, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return AttentionMemory(keys.requires_grad_(), values.requires_grad_(), torch.tensor(lengths))


def run(
    form: str, window: int | None, documents: Tensor | None, memory: AttentionMemory | None, q: Tensor, *kv: Tensor
):
    """The output, and the gradients of everything that went in."""
    with force(form):
        y = attention(AttentionInputs(q, *kv, window, documents, memory))
    leaves = [q, *kv, *(memory[:2] if memory is not None else ())]
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves)]


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@CPU_FORMS
@WINDOWS
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("lengths", [None, (0, 5)])
def test_who_sees_whom(
    form: str, window: int | None, documents: Tensor | None, lengths: tuple[int, int] | None
) -> None:
    """Equal scores and one-hot values make the output show the seen tokens, which loops count."""
    length = 18
    size = 7 if lengths else 0
    marks = torch.eye(size + length, dtype=torch.float64).expand(2, -1, -1)[:, :, None]
    q = torch.zeros(2, length, 1, size + length, dtype=torch.float64)
    memory = AttentionMemory(0 * marks[:, :size], marks[:, :size], torch.tensor(lengths)) if lengths else None
    with force(form):
        y = attention(AttentionInputs(q, q, marks[:, size:], window, documents, memory))
    for row, i, j in itertools.product(range(2), range(length), range(-size, length)):
        document = DOCUMENTS[row].tolist() if documents is not None else [0] * length
        known = document[max(j, 0)] == document[i] and (lengths is None or j >= -lengths[row])
        sees = j <= i and known and (window is None or i - j < window)
        assert (y[row, i, 0, size + j] > 0) == sees, (row, i, j)


@pytest.mark.parametrize("window", [None, 3])
def test_reference_is_transformers(window: int | None) -> None:
    q, k, v = inputs()
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
def test_the_fast_forms_are_the_reference(
    form: str,
    window: int | None,
    length: int,
    heads: int,
    groups: int,
    documents: Tensor | None,
    lengths: tuple[int, int] | None,
) -> None:
    tensors = inputs(length, heads, groups)
    documents = None if documents is None else documents[:, :length]
    memory = memory_of(lengths, groups) if lengths else None
    assert_all_close(*(run(each, window, documents, memory, *tensors) for each in (form, "reference")))


@FAST_FORMS
def test_they_are_the_reference_over_real_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tensors = inputs(700)
    documents = (torch.arange(700) // torch.tensor([[330], [1000]])).long()
    for window, packed in ((300, None), (300, documents), (None, documents)):
        assert_all_close(*(run(each, window, packed, None, *tensors) for each in (form, "reference")), 1e-10)


@CPU_FORMS
@pytest.mark.parametrize(
    ("window", "documents", "lengths"), [(None, None, None), (3, None, None), (5, DOCUMENTS, (0, 2))]
)
def test_gradients(form: str, window: int | None, documents: Tensor | None, lengths: tuple[int, int] | None) -> None:
    q, k, v = (x.detach()[:, :6, :, :2].requires_grad_() for x in inputs(heads=2, groups=1))
    memory = memory_of(lengths, 1) if lengths else memory_of((0, 0), 1)
    keys, values = (x.detach()[:, :3, :, :2].requires_grad_() for x in memory[:2])
    documents = None if documents is None else documents[:, :6]

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        given = AttentionMemory(keys, values, memory.length_B) if lengths else None
        return attention(AttentionInputs(q, k, v, window, documents, given))

    with force(form):
        assert gradcheck(function, (q, k, v, keys, values), fast_mode=True)


@CPU_FORMS
def test_bf16_is_near_the_reference_in_float64(form: str) -> None:
    tensors = inputs(dtype=torch.bfloat16)
    found = run(form, 5, DOCUMENTS, None, *tensors)
    expected = run("reference", 5, DOCUMENTS, None, *(x.detach().double().requires_grad_() for x in tensors))
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert_all_close([x.double() for x in found], expected, 0.03)


@CPU_FORMS
@pytest.mark.parametrize("window", [None, 5])
def test_documents_are_separate_rows(form: str, window: int | None) -> None:
    q, k, v = inputs()
    with force(form):
        y = attention(AttentionInputs(q, k, v, window, DOCUMENTS, None))
        for row, document in itertools.product(range(2), range(3)):
            own = DOCUMENTS[row] == document
            alone = attention(AttentionInputs(*(x[row, own][None] for x in (q, k, v)), window, None, None))
            torch.testing.assert_close(y[row, own], alone[0])


@CPU_FORMS
@pytest.mark.parametrize(("window", "keep"), [(None, None), (6, 5), (6, None), (1, 0)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_chunks_with_memory_are_the_whole_row(
    form: str, window: int | None, keep: int | None, documents: Tensor | None
) -> None:
    tensors = inputs()
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
    assert_all_close([y.detach(), *grads], run("reference", window, documents, None, *tensors))


def test_remember_counts_the_last_document_alone() -> None:
    _, k, v = inputs(length=3)
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
def test_no_bit_leaks_between_documents(form: str, window: int | None, with_memory: bool) -> None:
    """Other tokens in document 0 and in the memory: document 1's output and all gradients stay bit for bit."""
    documents = torch.tensor([[0] * 7 + [1] * 11])

    def probe(others: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        weight, x = torch.randn(32, 12, requires_grad=True), torch.randn(1, 18, 12)
        x = torch.cat((others, x[:, 7:]), dim=1).requires_grad_()
        q, k, v = (x @ weight.T).view(1, 18, 4, 8).split((2, 1, 1), dim=2)
        memory = (
            AttentionMemory(10 * q[:, :3, :1].detach(), v[:, :3].detach(), torch.tensor([3])) if with_memory else None
        )
        with force(form):
            y = attention(AttentionInputs(q, k, v, window, documents, memory))[:, 7:]
        x_grad, weight_grad = torch.autograd.grad(y.square().sum(), (x, weight))
        assert not x_grad[:, :7].any()
        return [y, x_grad, weight_grad]

    first = probe(torch.randn(1, 7, 12))
    second = probe(100 * torch.rand(1, 7, 12))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("window", "documents"), [(32, False), (32, True), (None, True)])
def test_blocked_keeps_little(window: int | None, documents: bool) -> None:
    """Memory saved for backward does not grow with the length's square."""
    length = 1024
    blocked.BLOCK = 32  # set back by the fixture
    tensors = inputs(length, 2, 1, torch.float32)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    packed = (torch.arange(length) // 900).expand(2, -1) if documents else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), force("blocked"):
        y = attention(AttentionInputs(*tensors, window, packed, None))
    assert y.requires_grad
    assert 0 < sum(kept.values()) < 2 * length * 4 * 150


def test_sdpa_is_the_reference() -> None:
    tensors = inputs()
    assert_all_close(*(run(form, None, None, None, *tensors) for form in ("sdpa", "reference")))


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
def test_flash_calls_mean_the_reference(
    form: str, window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Package("flash_attn", EMULATIONS[form](), "emulated")
    monkeypatch.setattr(flash_attn, "optional_package", lambda name: found)
    tensors = inputs()
    assert_all_close(*(run(each, window, documents, None, *tensors) for each in (form, "reference")))


def test_flash_does_not_look_for_borders_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Package("flash_attn", flash_emulation(), "emulated")
    monkeypatch.setattr(flash_attn, "optional_package", lambda name: found)
    q, k, v = inputs()
    with force("flash-attn"):
        looked = attention(AttentionInputs(q, k, v, 4, DOCUMENTS))
        monkeypatch.setattr(flash_attn, "document_boundaries", None)
        known = document_boundaries(DOCUMENTS)
        assert known.tolist() == [0, 9, 12, 18, 19, 34, 36]
        assert torch.equal(attention(AttentionInputs(q, k, v, 4, DOCUMENTS, None, known)), looked)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_the_order_of_flash_versions_is_that_of_the_rates(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare on the devices that each version supports."""
    monkeypatch.setattr(dispatch, "optional_package", lambda name: Package(name, flash_emulation(), "emulated"))
    monkeypatch.setattr(flash_attn, "compute_capability", lambda: gpu.capability)
    there = [each.name for each in flash_attn.FASTEST_FIRST if each.unavailable_reason("cuda") is None]
    rates = [gpu.rate("attention", f"flash{name.removeprefix('flash-attn')}") for name in there]
    assert rates == sorted(rates, reverse=True)
    assert there[0] == {9: "flash-attn-3", 10: "flash-attn-4"}[gpu.capability[0]]
    monkeypatch.setattr(flash_attn, "compute_capability", lambda: (8, 0))
    assert attention.choice("cuda")[0] == "flash-attn"


def test_what_flash_versions_leave_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    second, third, fourth = (attention.named(name).unsupported_reason for name in EMULATIONS)
    wide, uneven = (torch.zeros(1, 4, 1, channels, dtype=torch.bfloat16) for channels in (256, 36))
    assert [reason(AttentionInputs(wide, wide, wide)) is None for reason in (second, third, fourth)] == [
        True,
        True,
        False,
    ]
    assert [reason(AttentionInputs(uneven, uneven, uneven)) is None for reason in (second, third)] == [True, False]
    monkeypatch.setattr(flash_attn, "is_deterministic", lambda: True)
    assert "no fixed order" in third(AttentionInputs(wide, wide, wide))
    assert second(AttentionInputs(wide, wide, wide)) is None


def test_what_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "optional_package", lambda name: Package(name, None, "not installed"))
    assert attention.choice("cpu")[0] == "native"
    assert attention.choice("cuda")[0] == "sdpa"
    monkeypatch.setattr(dispatch, "optional_package", lambda name: Package(name, flash_emulation(), "emulated"))
    assert attention.choice("cuda")[0] == "flash-attn"


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
def test_a_package_of_the_same_name_is_distinguished(
    files: list[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 makes `flash_attn` a namespace, in which none of the functions lie."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dispatch, "optional_package", optional_package.__wrapped__)
    assert attention.choice("cuda")[0] == chosen


def test_reasons_say_what_is_not_supported() -> None:
    q, k, v = inputs()
    flash, sdpa = (attention.named(name).unsupported_reason for name in ("flash-attn", "sdpa"))
    half = AttentionInputs(*(x.bfloat16() for x in (q, k, v)))
    full = AttentionInputs(q, k, v)
    assert flash(half._replace(window=3, documents_BL=DOCUMENTS)) is None
    assert sdpa(full._replace(window=18)) is None
    assert "float64" in flash(full)
    assert "remembered" in flash(half._replace(memory=memory_of((1, 1))))
    assert "window" in sdpa(full._replace(window=17))
    assert "documents" in sdpa(full._replace(documents_BL=DOCUMENTS))
