"""Activations offloaded to the host's memory, in layouts whose ranks exchange saved tensors: equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridtron.config.schema import ParallelConfig
from hybridtron.model import offload
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.cases import Layout
from tests.distributed import run_distributed
from tests.parallel.test_fused_grad_accumulation import ALONE, REGATHERING, configured, gradients
from tests.slow import slow_except

LAYOUTS = [
    pytest.param(ALONE, None, id="alone"),
    pytest.param(Layout(tensor=2), REGATHERING, id="tp2-regather", marks=pytest.mark.gloo),
    pytest.param(Layout(pipeline=2, data=2), None, id="pp2-dp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
]


def offloaded(seat: Seat, fused: bool, layout: Layout, parallel: ParallelConfig | None) -> dict[str, Tensor]:
    """Return gradients of a model. The first three sub-layers of every stage offload all saved tensors."""
    config = configured(layout, fused, parallel=parallel)
    smallest = offload.SMALLEST
    offload.SMALLEST = 1
    try:
        return gradients(seat, replace(config, parallel=replace(config.parallel, offload=3)))
    finally:
        offload.SMALLEST = smallest


@pytest.mark.parametrize("fused", slow_except([False, True], True))
@pytest.mark.parametrize(("layout", "parallel"), LAYOUTS)
def test_offloading_in_layouts_changes_no_bit_of_the_gradients(
    layout: Layout, parallel: ParallelConfig | None, fused: bool
) -> None:
    ranks = layout.tensor * layout.pipeline * layout.data
    kept, *_ = run_distributed(gradients, ranks, configured(layout, fused, parallel=parallel))
    away, *_ = run_distributed(offloaded, ranks, fused, layout, parallel)
    assert kept.keys() == away.keys()
    assert all(torch.equal(away[name], kept[name]) for name in kept)
