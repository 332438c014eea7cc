"""Rows cut over ranks: each rank reads its own part, which equals a cut of the full rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hybridtron.config.choices import Documents, Feed, Order
from hybridtron.data.batch import Batch
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Ahead, Loader
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.phase_order import PhaseOrder
from hybridtron.data.sequence_shard import ShardIndex
from hybridtron.data.sources import Sources
from hybridtron.parallel.context import local_shard
from hybridtron.parallel.mesh import RankGroup
from tests.data.conftest import sources_of
from tests.slow import slow_except

READING = PhaseOrder(Order.windows, Documents.isolate, 16, 8, 2, 7, 100)


def assert_same(part_batch: Batch, wanted: Batch) -> None:
    for name in ("tokens_BL", "labels_BL", "mask_BL", "continues_B"):
        assert torch.equal(getattr(part_batch, name), getattr(wanted, name)), name
    for name in ("positions_BL", "documents_BL", "boundaries_E"):
        value = getattr(part_batch.seq, name)
        other = getattr(wanted.seq, name)
        assert (value is None) == (other is None)
        assert value is None or (value.dtype == other.dtype and torch.equal(value, other)), name
    assert part_batch.seq.spans() == wanted.seq.spans()
    shard_length = part_batch.seq.shard
    other = wanted.seq.shard
    assert shard_length is not None
    assert other is not None
    for field in fields(shard_length):
        value = getattr(shard_length, field.name)
        another = getattr(other, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, another), field.name
        else:
            assert value == another, field.name


def cut(batch: Batch, shard_index: ShardIndex) -> Batch:
    return local_shard(batch, RankGroup(shard_index.ranks, shard_index.rank))


@pytest.mark.parametrize(("order", "chunks"), [(Order.windows, 1), (Order.lanes, 1), (Order.lanes, 2)])
@pytest.mark.parametrize("documents", Documents)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_part_equals_a_cut_of_full_rows(
    make_folder: Callable[..., TokenFolder], ranks: int, order: Order, documents: Documents, chunks: int
) -> None:
    """Use two sources, one with masks, and two data-parallel ranks; a part may have a single token."""
    sources = sources_of((make_folder(masked=True), "text", 2), (make_folder(name="plain"), "text", 1))
    reading = replace(READING, kind=order, documents=documents, chunks=chunks)
    whole = Loader(sources, reading, rank=1, ranks=2)
    for rank in range(ranks):
        shard_index = ShardIndex(rank, ranks)
        loader = Loader(sources, reading, rank=1, ranks=2, shard_index=shard_index)
        assert loader.fingerprint == whole.fingerprint
        for step in range(5):
            part_batches = loader.micro_batches(step)
            wanted = whole.micro_batches(step)
            assert len(part_batches) == len(wanted) == 2
            for part_batch, whole_batch in zip(part_batches, wanted, strict=True):
                assert part_batch.tokens_BL.shape == (2, 16 // ranks)
                assert_same(part_batch, cut(whole_batch, shard_index))


def read_by(loader: Loader, monkeypatch: pytest.MonkeyPatch, steps: int) -> int:
    """Tokens that are asked of the sources."""
    counts = []
    read = DocumentStore.read

    def counted(store: DocumentStore, document: int, first: int, count: int) -> Any:
        counts.append(count)
        return read(store, document, first, count)

    with monkeypatch.context() as patched:
        patched.setattr(DocumentStore, "read", counted)
        for step in range(steps):
            loader.micro_batches(step)
    return sum(counts)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_rank_reads_its_part_alone(toy: TokenFolder, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """A rank reads its part and one more token of each row: the last label, which is the next part's first token."""
    sources = sources_of((toy, "text", 1))
    reading = replace(READING, seq_len=64, kind=Order.lanes, chunks=chunks)
    steps = 4
    rows = 8
    assert read_by(Loader(sources, reading), monkeypatch, steps) == steps * rows // chunks * (64 * chunks + 1)
    for rank in range(4):
        loader = Loader(sources, reading, shard_index=ShardIndex(rank, 4))
        assert read_by(loader, monkeypatch, steps) == steps * rows * (16 + 1)


def test_only_shards_of_a_part_are_fetched(make_folder: Callable[..., TokenFolder]) -> None:
    """A row over many shards, which come from elsewhere: here out of a compressed folder."""
    folder = make_folder(train=(15,) * 16, shard_size=100, compression="zstd")
    reading = replace(READING, seq_len=128, global_batch=1, micro_batch=1, shuffle_tokens=1)
    fetched = []
    for shard_index in (ShardIndex(), ShardIndex(0, 4), ShardIndex(3, 4)):
        sources = sources_of((folder, "text", 1))
        asked = set[int]()
        loader = Loader(sources, reading, shard_index=shard_index)
        (store,) = loader._rows._stores
        store.prepare = asked.update  # type: ignore[method-assign]
        loader.micro_batches(0)
        fetched.append(asked)
    whole, first, last = fetched
    assert len(first) <= len(whole) / 2
    assert first < whole
    assert last < whole
    assert first != last


@pytest.mark.parametrize("feed", Feed)
@pytest.mark.parametrize("workers", slow_except([0, 1], 0))
def test_parts_are_read_ahead(toy: TokenFolder, workers: int, feed: Feed) -> None:
    if feed is Feed.dali:
        pytest.importorskip("nvidia.dali", reason="make setup-dali")
    shard_index = ShardIndex(1, 2)
    sources = sources_of((toy, "text", 1))
    plain = Loader(sources, READING, shard_index=shard_index)
    for step, batches in enumerate(
        Loader(sources, READING, Ahead(workers), feed, shard_index=shard_index).iterate(3, 6), start=3
    ):
        for ahead, direct in zip(batches, plain.micro_batches(step), strict=True):
            assert_same(ahead.moved(torch.Tensor.cpu), direct)


def test_unequal_parts_and_joined_chunks_are_refused(toy: TokenFolder) -> None:
    sources: Sources = sources_of((toy, "text", 1))
    for reading, shard_index in (
        (READING, ShardIndex(0, 3)),
        (replace(READING, chunks=2, together=2), ShardIndex(0, 2)),
    ):
        with pytest.raises(ValueError, match="equal parts of one chunk"):
            Loader(sources, reading, shard_index=shard_index)
