"""The DALI feed makes the same batches as the torch feed; on a machine without a GPU on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from hybridtron.config.schema import Documents, Feed, Order
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Ahead, Loader
from hybridtron.data.order.phase_order import PhaseOrder
from tests.data.conftest import sources_of
from tests.data.test_loader import joined

pytest.importorskip("nvidia.dali", reason="make setup-dali")


@pytest.mark.parametrize(("order", "documents"), [*itertools.product(Order, Documents)])
@pytest.mark.parametrize("workers", [0, 1])
def test_dali_makes_the_batches_of_torch(
    make_folder: Callable[..., TokenFolder], order: Order, documents: Documents, workers: int
):
    """Compare batches from two folders, one with masks and one without."""
    sources = sources_of((make_folder(masked=True), "text", 1), (make_folder(name="plain"), "text", 1))
    reading = PhaseOrder(order, documents, 16, 8, 2, 7, 100)
    dali, plain = (Loader(sources, reading, Ahead(workers), feed, rank=1, ranks=2) for feed in (Feed.dali, Feed.torch))
    steps = list(dali.iterate(3, 9))  # all kept, so that memory which DALI uses again would show
    assert len(steps) == 6
    for step, batches in enumerate(steps, start=3):
        assert [len(batch.tokens_BL) for batch in batches] == [2, 2]
        tensors = joined(batches)
        expected = joined(plain.micro_batches(step))
        assert tensors.keys() == expected.keys()
        for name in expected:
            assert tensors[name].dtype == expected[name].dtype
            assert torch.equal(tensors[name].cpu(), expected[name]), name


def test_an_empty_range_of_steps_has_no_batches(toy: TokenFolder):
    reading = PhaseOrder(Order.windows, Documents.isolate, 16, 8, 2, 7, 100)
    assert not list(Loader(sources_of((toy, "text", 1)), reading, feed=Feed.dali).iterate(3, 3))
