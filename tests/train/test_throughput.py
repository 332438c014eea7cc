"""FLOPs of a phase's steps, compared with numbers by hand."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.parallel.context import local_shard
from hybridtron.parallel.mesh import RankGroup
from hybridtron.planning.count import count
from hybridtron.train.throughput import Throughput

LENGTH = 64
SHARES = 2
FULL_ATTENTION = ["recipe=laptop", "model.pattern=F", "model.layers.F={kind: attention, heads: 4}"]


def micro_batch(*borders: int) -> Batch:
    """Return a rank's second sequence shard of a row; documents begin at these places."""
    tokens_BL = torch.zeros(1, LENGTH, dtype=torch.int64)
    places_L = torch.arange(LENGTH)
    documents_BL = sum((places_L >= border for border in borders), torch.zeros(LENGTH)).int().unsqueeze(0)
    batch = Batch(tokens_BL, tokens_BL, tokens_BL == 0, SeqInfo(places_L.unsqueeze(0), documents_BL))
    return local_shard(batch, RankGroup(SHARES, 1))


def work(*settings: str) -> Throughput:
    return Throughput(resolve(load([*FULL_ATTENTION, f"phases.0.seq_len={LENGTH}", *settings]))[0], SHARES)


def test_imbalance_counts_all_rows_of_a_step() -> None:
    """A token of a first half sees 1 to 32 keys, of a second 33 to 64, or as few where a document begins at the cut."""
    first = sum(range(1, 33))
    second = sum(range(33, 65))
    model = load(FULL_ATTENTION).model
    attention = count(architecture(model), LENGTH).layers[0].flops["attention"] / ((1 + LENGTH) / 2)  # for each key
    alike = 32 * (count(architecture(model), LENGTH).forward_flops - attention * (1 + LENGTH) / 2)
    first_half_flops = 2 * alike + 2 * first * attention
    other = 2 * alike + (first + second) * attention
    shared = work(f"parallel.context={SHARES}")
    assert shared.imbalance([micro_batch(), micro_batch(32)]) == pytest.approx(other / ((first_half_flops + other) / 2))
    assert shared.imbalance([micro_batch(32)]) == 1


def test_undivided_rows_have_no_imbalance() -> None:
    assert work().imbalance([]) is None


def test_rates_are_given_for_each_rank() -> None:
    flops = count(architecture(load(FULL_ATTENTION).model), LENGTH).flops_per_token
    assert work().rates(1e6) == (pytest.approx(flops / 1e6 / SHARES), None)
    tflops, mfu = work("cluster.peak_tflops=100").rates(1e6)
    assert mfu == pytest.approx(tflops / 100)
