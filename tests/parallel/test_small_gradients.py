"""Small gradients that are added to Megatron's buffers together, compared with those that Megatron adds alone."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel import small_gradients
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.small_gradients import add_together, cast_together
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import random_batch, small_config, small_run
from tests.distributed import run_distributed


def configured(layout: Layout, parallel: ParallelConfig, precision: str = "bf16") -> Config:
    model = small_model("M-W-", tied=True, heads={"kv_heads": 2})
    config = small(model, layout.on(parallel), Documents.isolate, data=layout.data)
    return replace(config, precision=small_run(precision=precision).precision)


def gradients(seat: Seat, config: Config, small_size: int) -> tuple[dict[str, Tensor], int]:
    """Return the second step's gradients, and how many were added to buffers together.

    From the second step on, Megatron starts to reduce gradients during the backward pass.
    """
    counts: list[int] = []

    def counting(totals: tuple[Tensor, ...], small: tuple[Tensor, ...]) -> None:
        counts.append(len(totals))
        add_together(totals, small)

    with (
        patch.object(small_gradients, "SMALL", small_size),
        patch.object(small_gradients, "add_together", counting),
        seat.groups(config.parallel) as groups,
    ):
        engine = Engine(resolve(config)[0], groups)
        batches = micro_batches(resolve(config)[0])
        engine.forward_backward(batches)
        engine.optimizer.step(0.0)
        engine.forward_backward(batches)
        return {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}, sum(counts)


OVERLAPPED = ParallelConfig(overlap_grad_reduce=True)
LAYOUTS = [
    pytest.param(Layout(), ParallelConfig(), id="alone"),
    pytest.param(Layout(data=2), OVERLAPPED, id="dp2-overlapped", marks=pytest.mark.gloo),
    pytest.param(Layout(tensor=2), ParallelConfig(sequence=True), id="tp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
    pytest.param(Layout(pipeline=2, data=2), OVERLAPPED, id="pp2-dp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
]


@pytest.mark.parametrize(("layout", "parallel"), LAYOUTS)
def test_sums_have_the_bits_of_those_that_megatron_makes(layout: Layout, parallel: ParallelConfig) -> None:
    ranks = layout.tensor * layout.pipeline * layout.data
    config = configured(layout, parallel)
    (alone, none), *_ = run_distributed(gradients, ranks, config, 0)
    (together, some), *_ = run_distributed(gradients, ranks, config, 2**16)
    assert none == 0 < some
    assert any(gradient.any() for gradient in alone.values())
    assert alone.keys() == together.keys()
    for name, gradient in alone.items():
        assert torch.equal(together[name], gradient), name


def test_a_product_that_adds_its_gradient_is_left_alone() -> None:
    fused = ParallelConfig(gradient_accumulation_fusion=True)
    ((expected, _),) = run_distributed(gradients, 1, configured(Layout(), fused, "fp32"), 0)
    ((together, _),) = run_distributed(gradients, 1, configured(Layout(), fused, "fp32"), 2**16)
    for name, gradient in expected.items():
        assert torch.equal(together[name], gradient), name


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_of_a_failed_backward_pass_are_not_added_later(alone: Groups, zeroes: bool) -> None:
    """All weights are small, so the failed pass adds nothing to the buffers, and they need not be set to zero."""
    engine = Engine(resolve(small_run(small_config("M-W-")))[0], alone)
    batch = random_batch()
    engine.forward_backward([batch])
    expected = {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}
    weight = engine.optimizer.shards["layers.0.mixer.in_proj.weight"].weight

    def fail(_: Tensor) -> None:
        raise RuntimeError("planted")

    engine.optimizer.zero_grad()
    hook = weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        engine.forward_backward([batch])
    hook.remove()
    if zeroes:
        engine.optimizer.zero_grad()
    engine.forward_backward([batch])
    for name, gradient in engine.optimizer.gradients():
        assert torch.equal(gradient, expected[name]), name


def test_gradients_are_cast_together() -> None:
    gradients = (torch.randn((), dtype=torch.bfloat16), torch.randn(3, 5, dtype=torch.bfloat16))
    copies = cast_together(gradients, torch.float32)
    for copy, gradient in zip(copies, gradients, strict=True):
        assert copy.dtype == torch.float32
        assert copy.shape == gradient.shape
        assert torch.equal(copy, gradient.float())
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
