"""Gradients that are added up in bf16, over micro-batches and ranks, beside those in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.config.choices import KeptFormat
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import small_run
from tests.distributed import run_distributed

FP32 = KeptFormat.fp32
BF16 = KeptFormat.bf16


def configured(layout: Layout, gradients: KeptFormat) -> Config:
    model = small_model("M-W-", tied=True, heads={"kv_heads": 2})
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=layout.data)
    return replace(config, precision=replace(small_run(precision="bf16").precision, gradients=gradients))


def stepped(seat: Seat, config: Config) -> tuple[dict[str, Tensor], dict[str, torch.dtype], tuple[int, int], bool]:
    """Gradients of a step, the types they are kept in, the bytes of these and those planned; whether it was taken."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        engine.forward_backward(micro_batches(resolve(config)[0]))
        gradients = {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}
        kept = {name: shard.weight.main_grad for name, shard in engine.optimizer.shards.items()}
        planned = plan(resolve(config)[0], groups.world_size).ranks[groups.pipeline.rank].memory.gradients
        taken = engine.optimizer.step(1e-3)[1]
        return (
            gradients,
            {name: g.dtype for name, g in kept.items()},
            (sum(g.nbytes for g in kept.values()), planned),
            taken,
        )


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(data=2), id="dp2"),
        pytest.param(Layout(tensor=2), id="tp2", marks=pytest.mark.slow),
        pytest.param(Layout(pipeline=2, data=2), id="pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_sums_in_bf16_differ_by_rounding_alone(layout: Layout) -> None:
    """Gradients of fp32 weights stay in fp32, and their memory agrees with the plan."""
    ranks = layout.tensor * layout.pipeline * layout.data
    (wide, _, sizes, _), *_ = run_distributed(stepped, ranks, configured(layout, FP32))
    (narrow, dtypes, narrow_sizes, taken), *_ = run_distributed(stepped, ranks, configured(layout, BF16))
    assert taken
    assert all((dtype == torch.float32) == name.endswith(("A_log", ".D", "dt_bias")) for name, dtype in dtypes.items())
    for name, gradient in wide.items():
        error = (narrow[name].double() - gradient.double()).norm()
        assert 0 < error <= 2e-2 * gradient.double().norm() or dtypes[name] == torch.float32, name
    assert sizes[0] == sizes[1]
    assert narrow_sizes[0] == narrow_sizes[1] < 0.6 * sizes[0]
