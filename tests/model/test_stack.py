"""Sub-layers one after the other are x + mixer(norm(x)), to the bit, though each one's sum is made by the next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import ParallelConfig, Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import Stack
from hybridtron.planning.activations import sublayer_uses
from tests.conftest import random_batch, small_config, small_run

PATTERN = "M-WS-"


def small_stack(recompute: Recompute, dtype: torch.dtype) -> Stack:
    model = LanguageModel(architecture(small_config(PATTERN)), recompute=recompute)
    initialise(model, seed=1)
    return model.cast(dtype).layers


def plain_loop(stack: Stack, x_LBD: Tensor, seq: SeqInfo) -> Tensor:
    for layer in stack.values():
        x_LBD = x_LBD + layer.mixer(layer.norm(x_LBD, None)[1], None, seq).y_LBD
    return x_LBD


def run(stack: Stack, stream: torch.dtype, plain: bool) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor]:
    """Return the tensors saved for backward, every gradient, and the stream after the last sub-layer."""
    torch.manual_seed(2)
    batch = random_batch(documents=[[10, 14], [24]])
    x_LBD = torch.randn(24, 2, 32, dtype=stream, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if plain:
            out_LBD = plain_loop(stack, x_LBD, batch.seq)
        else:
            out_LBD = stack(x_LBD, None, batch.seq).x_LBD
    gradients = torch.autograd.grad(out_LBD, [x_LBD, *stack.parameters()], torch.randn_like(out_LBD))
    return kept, gradients, out_LBD


@pytest.mark.parametrize(
    ("dtype", "stream"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("recompute", list(Recompute))
def test_deferred_sums_equal_plain_sums_bit_for_bit(
    recompute: Recompute, dtype: torch.dtype, stream: torch.dtype
) -> None:
    stack = small_stack(recompute, dtype)
    _, gradients, out_LBD = run(stack, stream, plain=False)
    _, expected, plain_LBD = run(stack, stream, plain=True)
    assert out_LBD.dtype == gradients[0].dtype == stream
    assert torch.equal(out_LBD, plain_LBD)
    assert all(map(torch.equal, gradients, expected))
    assert not out_LBD._is_view()  # which a pipeline stage's output must not be


def test_deferred_sums_keep_no_more_memory_than_plain_sums() -> None:
    stack = small_stack(Recompute.none, torch.bfloat16)
    ours, theirs = (
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in run(stack, torch.bfloat16, plain)[0]}
        for plain in (False, True)
    )
    assert sum(ours.values()) == sum(theirs.values())


@pytest.mark.parametrize("wide", [False, True])
def test_recomputed_sub_layer_keeps_one_tensor_of_the_planned_bytes(wide: bool) -> None:
    stream = {True: torch.float32, False: torch.bfloat16}[wide]
    kept, _, _ = run(small_stack(Recompute.layer, torch.bfloat16), stream, plain=False)
    streams = [t for t in kept if t.shape == (24, 2, 32)]
    config = small_run(replace(small_config(PATTERN), residual_fp32=wide), precision="bf16")
    uses = sublayer_uses(resolve(replace(config, parallel=ParallelConfig(recompute=Recompute.layer)))[0])
    assert [t.nbytes for t in streams] == [2 * 24 * 2 * use.kept for use in uses]
