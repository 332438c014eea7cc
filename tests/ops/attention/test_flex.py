"""Attention as FlexAttention: its forward on the CPU, its tiles against masks of L x S, and on CUDA its gradients."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import _dynamo as dynamo
from torch._dynamo.testing import CompileCounter

from hybridtron.ops import flex_tiles
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention, flex
from hybridtron.ops.attention.flex import TILE, block_mask, seen_keys
from hybridtron.ops.dispatch import force

LENGTHS = [128, 300, 517]
WINDOWS = [None, 1, 40, 128, 129, 300, 1000]
MEMORIES = [None, (0, 0), (39, 5), (250, 131)]  # remembered tokens of each row; 250 are held
PLACES = [(-1, 1, 1), (-1, 1), (-1,)]
DOCUMENTS = {
    "one stream": [],
    "long": [[0.4], [0.1, 0.9]],
    "short": [[n / 20 for n in range(1, 20)], [0.5]],
    "whole rows": [[], []],
}


def documents_of(name: str, length: int) -> Tensor | None:
    """Borders at these shares of two rows."""
    if not DOCUMENTS[name]:
        return None
    places = torch.arange(length) / length
    return torch.stack([sum((places >= b).long() for b in row) + torch.zeros(length).long() for row in DOCUMENTS[name]])


def memory_of(lengths: tuple[int, int] | None, groups: int = 2) -> AttentionMemory | None:
    if lengths is None:
        return None
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 250, groups, 16, generator=generator) for _ in range(2))
    return AttentionMemory(keys, values, torch.tensor(lengths))


def random_inputs(length: int, share: int) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    return AttentionInputs(*(torch.randn(2, length, heads, 16, generator=generator) for heads in (2 * share, 2, 2)))


def visible(length: int, window: int | None, documents: Tensor | None, memory: AttentionMemory | None) -> Tensor:
    """The rules, token by token, (B, L, S): a mask that only a test may make."""
    before = 0
    if memory is not None:
        before = 250
    query = torch.arange(length)[:, None]
    key = torch.arange(-before, length)
    seen = (key <= query) & (query - key < (window or length + before))
    seen = seen.expand(2, -1, -1)
    if documents is not None:
        of_keys = torch.cat([documents[:, :1].expand(-1, before), documents], dim=1)
        seen = seen & (documents[:, :, None] == of_keys[:, None])
    if memory is not None:
        seen = seen & (key >= -memory.length_B[:, None, None])
    return seen


def listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Mark the tiles that a list names, (B, T, U), each once."""
    assert ((indices >= 0) & (indices < columns)).all()
    listed_only = torch.where(torch.arange(indices.shape[-1]) < counts[..., None], indices, columns).long()
    times = torch.zeros(*counts.shape, columns + 1, dtype=torch.int64)
    times.scatter_add_(-1, listed_only, torch.ones_like(listed_only))
    assert times[..., :columns].max() <= 1
    return times[:, 0, :, :columns].bool()


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_agree_with_the_whole_mask(length: int, documents: str) -> None:
    """Tiles without visible pairs are left out, full ones unmasked; the keys' lists are the transposed ones."""
    for window, remembered in itertools.product(WINDOWS, MEMORIES):
        numbers = documents_of(documents, length)
        memory = memory_of(remembered)
        seen = visible(length, window, numbers, memory)
        total = seen.shape[2]
        inputs = random_inputs(length, 1)._replace(window=window, documents_BL=numbers, memory=memory)
        mask = block_mask(seen_keys(inputs), total)
        b, query, key = (torch.arange(n).view(shape) for n, shape in zip(seen.shape, PLACES, strict=True))
        assert torch.equal(mask.mask_mod(b, torch.zeros(1), query, key), seen)
        sides = (0, -total % TILE, 0, -length % TILE)
        some, not_all = (
            torch.nn.functional.pad(x, sides).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).any(4).any(2)
            for x in (seen, ~seen)
        )
        not_all |= torch.arange(some.shape[2]) >= total // TILE  # the last tile of keys may hold fewer
        masked, whole = (
            listed(counts, indices, some.shape[2])
            for counts, indices in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        )
        assert torch.equal(masked, some & not_all)
        assert torch.equal(whole, some & ~not_all)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, some.shape[1]), masked.mT)
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, some.shape[1]), whole.mT)


@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize("remembered", MEMORIES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_forward_equals_the_reference(documents: str, remembered: tuple[int, int] | None, share: int) -> None:
    length = 300
    memory = memory_of(remembered)
    inputs = random_inputs(length, share)._replace(documents_BL=documents_of(documents, length), memory=memory)
    for window in (None, 70):
        outputs = {}
        for form in ("flex", "reference"):
            with force(attention=form):
                outputs[form] = attention(inputs._replace(window=window))
        torch.testing.assert_close(outputs["flex"], outputs["reference"], rtol=1e-5, atol=1e-5)


def test_flex_attention_refuses_unsupported_inputs() -> None:
    form = attention.named("flex")
    inputs = random_inputs(128, 1)._replace(window=40)
    q = inputs.q_BLHK
    assert form.unsupported_reason(inputs) is None
    assert "float64" in form.unsupported_reason(inputs._replace(q_BLHK=q.double()))
    assert "channels" in form.unsupported_reason(inputs._replace(q_BLHK=q[..., :8]))
    assert "tokens" in form.unsupported_reason(inputs._replace(q_BLHK=q[:, :127]))


@pytest.mark.gpu
@pytest.mark.parametrize("remembered", MEMORIES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_gradients_equal_the_reference(documents: str, remembered: tuple[int, int] | None) -> None:
    for length, window in itertools.product(LENGTHS, (None, 70, 129)):
        results = {}
        for form in ("flex", "reference"):
            q, k, v = (x.cuda().requires_grad_() for x in random_inputs(length, 2)[:3])
            leaves = [q, k, v]
            memory = memory_of(remembered)
            numbers = documents_of(documents, length)
            if numbers is not None:
                numbers = numbers.cuda()
            if memory is not None:
                keys, values = (x.cuda().requires_grad_() for x in memory[:2])
                leaves += [keys, values]
                memory = AttentionMemory(keys, values, memory.length_B.cuda())
            with force(attention=form):
                y = attention(AttentionInputs(q, k, v, window, numbers, memory))
            results[form] = [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
        for ours, theirs in zip(results["flex"], results["reference"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_layers_of_equal_window_share_the_tiles_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[int | None] = []
    form = attention.named("flex")
    inputs = random_inputs(300, 1)
    monkeypatch.setattr(flex, "seen_keys", lambda inputs: windows.append(inputs.window) or seen_keys(inputs))
    for _ in range(2):  # batches
        documents = documents_of("long", 300)
        for window in (40, None, 40, None):  # layers
            form.function(inputs._replace(window=window, documents_BL=documents))
    assert windows == [40, None, 40, None]
    assert len(flex._of_batches) == 1
    del documents
    assert not flex._of_batches


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Count kernels as on CUDA in training; the kernels themselves run uncompiled."""
    counter = CompileCounter()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **settings: compiled(call, backend=counter, **settings))
    monkeypatch.setattr(flex_tiles, "_needs_kernel", lambda q: True)
    monkeypatch.setattr(flex, "_sizes_repeat", lambda inputs: True)
    flex_tiles._compiled.cache_clear()
    yield counter
    flex_tiles._compiled.cache_clear()


def batch_of(length: int, number: int) -> AttentionInputs:
    """Documents of batch `number`: other borders, and more of them, in each batch."""
    borders = torch.rand(2, number, generator=torch.Generator().manual_seed(number)).sort().values
    places = (torch.arange(length) / length).expand(2, -1).contiguous()
    return random_inputs(length, 2)._replace(documents_BL=torch.searchsorted(borders, places))


def test_batches_with_other_documents_compile_no_kernel(kernels: CompileCounter) -> None:
    for number in range(5):
        inputs = batch_of(300, number)
        for window in (None, 70):
            case = inputs._replace(window=window)
            with force(attention="flex"):
                y = attention(case)
            torch.testing.assert_close(y, attention.reference.function(case), rtol=1e-5, atol=1e-5)
        assert kernels.frame_count == 1
    with force(attention="flex"):
        attention(random_inputs(300, 2))  # whole rows
    assert kernels.frame_count == 1


@pytest.mark.slow
def test_each_length_and_each_number_of_heads_has_a_kernel(kernels: CompileCounter) -> None:
    """Many more than the eight that torch compiles for one function."""
    cases = [(length, share) for length in range(300, 305) for share in (1, 2)]
    with force(attention="flex"):
        for length, share in cases:
            for _ in range(2):
                attention(random_inputs(length, share)._replace(window=40))
    assert kernels.frame_count == len(cases)


def test_lengths_share_a_kernel_without_gradients(kernels: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_sizes_repeat", lambda inputs: False)
    with force(attention="flex"):
        for length in (300, 310, 400, 517):
            attention(random_inputs(length, 1)._replace(window=40))
    assert kernels.frame_count == 1


def sizes_of(inputs: AttentionInputs, fixed: bool) -> flex_tiles.KernelSizes:
    lengths = (2, inputs.q_BLHK.shape[1], inputs.k_BLGK.shape[1]) if fixed else None
    return flex_tiles.KernelSizes("rule", (4, 2, 16), lengths, (torch.float32, False, False, False))


def test_a_kernel_for_fixed_sizes_never_computes_without_a_kernel(kernels: CompileCounter) -> None:
    """Beyond torch's limit of kernels for one function it raises torch's error."""
    first, second = (random_inputs(length, 2) for length in (300, 310))
    call = flex_tiles._compiled(sizes_of(first, True))

    def run(inputs: AttentionInputs) -> Tensor:
        mask = block_mask(seen_keys(inputs), inputs.k_BLGK.shape[1])
        return call(*(x.transpose(1, 2) for x in inputs[:3]), block_mask=mask, enable_gqa=True)

    with dynamo.config.patch(recompile_limit=1):
        run(first)
        with pytest.raises(dynamo.exc.FailOnRecompileLimitHit):
            run(second)


def test_attention_without_a_kernel_on_a_gpu_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flex_tiles, "flex_attention", lambda q, *_, **__: q)
    flex_tiles._warn_of_no_kernel.cache_clear()
    for is_cuda in (False, True, True):
        q: Any = SimpleNamespace(is_cuda=is_cuda)
        mask: Any = None
        flex_tiles._attended(q, q, q, mask, False)
        assert len(caplog.records) == is_cuda
    assert "without a kernel" in caplog.text
    flex_tiles._warn_of_no_kernel.cache_clear()


def test_sizes_repeat_in_training_alone() -> None:
    inputs = random_inputs(128, 1)
    trained = inputs._replace(q_BLHK=inputs.q_BLHK.requires_grad_())
    remembered = trained._replace(memory=memory_of((1, 1)))
    assert flex._sizes_repeat(trained)
    assert flex._sizes_repeat(remembered._replace(window=40))
    assert not flex._sizes_repeat(remembered)
    with torch.no_grad():
        assert not flex._sizes_repeat(trained)
