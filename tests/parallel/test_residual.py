"""A residual stream in fp32 beside bf16 weights, cut into stages and over tensor-parallel ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import small_run
from tests.distributed import run_distributed

PIPELINES = {"pp2": Layout(pipeline=2), "pp2-virtual2": Layout(pipeline=2, virtual=2)}
CUT = {"tp2-sp": Layout(tensor=2, sequence=True), "tp2-pp2": Layout(tensor=2, sequence=True, pipeline=2)}


def configured(layout: Layout) -> Config:
    model = replace(small_model("M-W-S-", tied=False, heads={"kv_heads": 2}), residual_fp32=True)
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=1)
    return replace(config, precision=small_run(precision="bf16").precision)


def stepped(seat: Seat, config: Config) -> tuple[float, dict[str, Tensor], tuple[int, int]]:
    """Loss and gradients of a step, and the bytes that the process's first stage puts out, and those planned."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        sent = []
        engine.stages[0].register_forward_hook(lambda _, __, out: sent.append(out.output.nbytes))
        batches = micro_batches(resolve(config)[0])
        loss = engine.forward_backward(batches).mean.item()
        gradients = {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}
        planned = plan(resolve(config)[0], groups.world_size).ranks[groups.pipeline.rank].traffic.pipeline
        return loss, gradients, (sum(sent), planned)


@functools.cache
def serial() -> tuple[float, dict[str, Tensor]]:
    ((loss, gradients, _),) = run_distributed(stepped, 1, configured(Layout()))
    return loss, gradients


@pytest.mark.gloo
@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-virtual2", marks=pytest.mark.slow)])
def test_pipeline_stages_send_every_bit_of_an_fp32_stream(layout: str) -> None:
    """A stage's output has the planned size."""
    expected, whole = serial()
    ((loss, gradients, (sent, planned)), *_) = run_distributed(stepped, 2, configured(PIPELINES[layout]))
    assert loss == expected
    assert [name for name in whole if not torch.equal(gradients[name], whole[name])] == []
    if layout == "pp2":
        assert sent == planned


@pytest.mark.gloo
@pytest.mark.parametrize("layout", ["tp2-sp", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_differ_by_rounding_alone(layout: str) -> None:
    """A product over two ranks is the sum of two rounded ones."""
    config = configured(CUT[layout])
    expected, whole = serial()
    ((loss, gradients, _), *_) = run_distributed(stepped, config.parallel.tensor * config.parallel.pipeline, config)
    assert loss == pytest.approx(expected, rel=1e-3)
    ours, theirs = (torch.cat([g[name].double().flatten() for name in whole]) for g in (gradients, whole))
    assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
