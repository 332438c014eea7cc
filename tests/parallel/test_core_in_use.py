"""Layouts use megatron-core's own parts: its schedules, data parallelism, optimizer and parallel layers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import LAYOUTS, table
from tests.distributed import run_distributed

LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)

pytestmark = pytest.mark.gloo


def config_of(architecture: str, layout: str) -> Config:
    return next(case.config for case in table() if (case.name, case.layout) == (architecture, layout))


def schedule_in_use(seat: Seat, config: Config) -> tuple[str, str]:
    """Module and name of the function that runs the micro-batches."""
    asked: list[Any] = []

    def spy() -> Any:
        asked.append(get_forward_backward_func())
        return asked[-1]

    with seat.groups(config.parallel) as groups, patch("hybridtron.engine.schedule.get_forward_backward_func", spy):
        Engine(resolve(config)[0], groups).forward_backward(micro_batches(resolve(config)[0]))
    (function,) = asked
    return function.__module__, function.__name__


def parts_in_use(seat: Seat, config: Config) -> tuple[bool, bool, dict[str, str]]:
    """Return if stages and optimizers are megatron-core's, and its layer for each matrix that is cut."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        wrapped = all(type(stage) is DistributedDataParallel for stage in engine.wrapped)
        chained = engine.optimizer.megatron.chained_optimizers
        optimizers = all(type(optimizer) is DistributedOptimizer for optimizer in chained)
        holders = {}
        for stage in engine.stages:
            for name, module in stage.model.named_modules():
                for layer in LAYERS:
                    if isinstance(module, layer):
                        holders[f"{name}.weight"] = layer.__name__
        return wrapped, optimizers, holders


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("tp2", "forward_backward_no_pipelining"),
        ("pp2", "forward_backward_pipelining_without_interleaving"),
        ("pp2-virtual2", "forward_backward_pipelining_with_interleaving"),
    ],
)
def test_layouts_run_the_schedules_of_megatron(layout: str, name: str) -> None:
    schedules = run_distributed(schedule_in_use, 2, config_of("samba", layout))
    assert schedules == [("megatron.core.pipeline_parallel.schedules", name)] * 2


def test_layouts_use_the_layers_and_optimizers_of_megatron() -> None:
    ranks = LAYOUTS["tp2-pp2"]
    parts = run_distributed(parts_in_use, ranks.tensor * ranks.pipeline, config_of("mamba-swa-mlp", "tp2-pp2"))
    holders: dict[str, str] = {}
    for wrapped, optimizers, of_rank in parts:
        assert wrapped
        assert optimizers
        holders |= of_rank
    kinds = {"in_proj": LAYERS[0], "dt_proj": LAYERS[0], "q": LAYERS[0], "kv": LAYERS[0], "gate_up": LAYERS[0]}
    kinds |= {"x_proj": LAYERS[1], "out_proj": LAYERS[1], "out": LAYERS[1], "down": LAYERS[1]}
    assert holders.pop("embedding.weight") == "VocabParallelEmbedding"
    assert "head.weight" not in holders  # the loss multiplies with it, and never has all logits
    assert {name.split(".")[-2] for name in holders} == set(kinds)
    assert all(kinds[name.split(".")[-2]].__name__ == layer for name, layer in holders.items())
