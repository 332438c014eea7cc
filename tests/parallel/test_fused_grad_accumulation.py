"""Weight gradients added to a step's sums by products, compared with those added by Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel import fused_grad_accumulation
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import small_run
from tests.distributed import run_distributed

ALONE = Layout()
PROJECTIONS = {"in_proj", "dt_proj", "out_proj", "bc_proj", "q", "kv", "out", "gate_up", "down"}
REGATHERING = ParallelConfig(sequence=True, regather=True)


def configured(layout: Layout, fused: bool, precision: str = "fp32", parallel: ParallelConfig | None = None) -> Config:
    model = small_model("MSW-", tied=True, heads={"kv_heads": 2})
    on = replace(layout.on(parallel or ParallelConfig()), gradient_accumulation_fusion=fused)
    return replace(
        small(model, on, Documents.isolate, data=layout.data), precision=small_run(precision=precision).precision
    )


def gradients(seat: Seat, config: Config, forgotten: bool = False) -> dict[str, Tensor]:
    """Return the second step's gradients. The first step's were cleared before, and Megatron overlaps in the second."""
    with seat.groups(config.parallel) as groups, ExitStack() as stack:
        if forgotten:
            stack.enter_context(forgets_to_say())
        engine = Engine(resolve(config)[0], groups)
        batches = micro_batches(resolve(config)[0])
        engine.forward_backward(batches)
        engine.optimizer.step(0.0)
        engine.forward_backward(batches)
        return {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}


@contextmanager
def forgets_to_say() -> Iterator[None]:
    """Megatron adds the gradient, which the sum has already."""
    kept = fused_grad_accumulation.weight_gradient

    def forgetting(weight: Tensor, grads_TO: list[Tensor], x_TI: Tensor) -> Tensor:
        kept(weight, grads_TO, x_TI)
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        return torch.cat(grads_TO, 1).mT @ x_TI

    fused_grad_accumulation.weight_gradient = forgetting
    try:
        yield
    finally:
        fused_grad_accumulation.weight_gradient = kept


LAYOUTS = [
    pytest.param(ALONE, None, id="alone"),
    pytest.param(Layout(tensor=2), ParallelConfig(sequence=True), id="tp2-sequence", marks=pytest.mark.gloo),
    pytest.param(Layout(tensor=2), None, id="tp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
    pytest.param(Layout(tensor=2), REGATHERING, id="tp2-regather", marks=[pytest.mark.gloo, pytest.mark.slow]),
    pytest.param(Layout(data=2), None, id="dp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
    pytest.param(Layout(pipeline=2, data=2), None, id="pp2-dp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
]


@pytest.mark.parametrize(("layout", "parallel"), LAYOUTS)
def test_fused_gradients_equal_those_that_megatron_adds(layout: Layout, parallel: ParallelConfig | None) -> None:
    ranks = layout.tensor * layout.pipeline * layout.data
    added, *_ = run_distributed(gradients, ranks, configured(layout, False, parallel=parallel))
    fused, *_ = run_distributed(gradients, ranks, configured(layout, True, parallel=parallel))
    assert any(gradient.any() for gradient in added.values())
    for name, gradient in added.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item(), msg=name)


def test_fused_gradients_of_bf16_weights_are_summed_in_fp32() -> None:
    (added,) = run_distributed(gradients, 1, configured(ALONE, False, "bf16"))
    (fused,) = run_distributed(gradients, 1, configured(ALONE, True, "bf16"))
    for name, gradient in added.items():
        assert fused[name].dtype == torch.float32
        assert (fused[name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def test_gradients_counted_twice_are_noticed() -> None:
    (added,) = run_distributed(gradients, 1, configured(ALONE, False))
    (wrong,) = run_distributed(gradients, 1, configured(ALONE, True), True)
    twice = {name for name, gradient in added.items() if (wrong[name] - 2 * gradient).norm() < 1e-4 * gradient.norm()}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in twice} == PROJECTIONS
