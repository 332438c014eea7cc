"""The loader: the same rows for every layout and from every step, against rows that are put together here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, DataConfig, Documents, Order, PhaseConfig, RunConfig, Source
from hybridtron.data.batch import Batch
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Ahead, Loader, build_loader
from hybridtron.data.mds.store import DataError
from hybridtron.data.mixture_spec import reading_plan
from hybridtron.data.order.phase_order import PhaseOrder, phase_seed
from hybridtron.data.prepare import corpus
from hybridtron.data.prepare.documents import Document
from hybridtron.data.sources import Sources
from hybridtron.data.validation import HeldOutBatch, held_out
from hybridtron.parallel.mesh import RankGroup
from hybridtron.problems import ConfigError
from hybridtron.train.held_out_loss import shared_out
from tests.data.conftest import EOS, sources_of, toy_documents
from tests.refusals import raises_code

MODES = list(itertools.product(Order, Documents))
FIELDS = ("tokens_BL", "labels_BL", "mask_BL", "continues_B")


def order_of(
    order: Order = Order.windows,
    documents: Documents = Documents.isolate,
    micro_batch: int = 2,
    seed: int = 7,
    seq_len: int = 16,
    shuffle: int = 100,
) -> PhaseOrder:
    return PhaseOrder(order, documents, seq_len, 8, micro_batch, seed, shuffle)


def joined(batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Micro-batches as one, by name."""
    whole = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS}
    whole["positions_BL"] = torch.cat([batch.seq.positions_BL for batch in batches])
    if batches[0].seq.documents_BL is not None:
        whole["documents_BL"] = torch.cat([batch.seq.documents_BL for batch in batches])
    return whole


def same(a: Sequence[Batch], b: Sequence[Batch]) -> bool:
    first = joined(a)
    second = joined(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("documents", Documents)
def test_joined_chunks_read_the_rows_of_separate_chunks(toy: TokenFolder, documents: Documents) -> None:
    """With gradients through time a group of lanes is one micro-batch; detached it is one per chunk, turn by turn."""
    reading = replace(order_of(Order.lanes, documents), chunks=2)
    apart, together = (Loader(sources_of((toy, "text", 1)), replace(reading, together=chunks)) for chunks in (1, 2))
    assert apart.fingerprint == together.fingerprint
    for step in range(3):
        whole = together.micro_batches(step)
        assert [batch.tokens_BL.shape for batch in whole] == [(2, 32)] * 2
        first, second = zip(*(batch.chunks(2) for batch in whole), strict=True)
        assert same([*first, *second], apart.micro_batches(step))


def test_isolated_windows_restart_positions_at_documents(toy: TokenFolder):
    """A toy token identifies its document: they count up, and eos ends each."""
    whole = joined(Loader(sources_of((toy, "text", 1)), order_of()).micro_batches(4))
    ends = {int(document[-1]) for document in toy_documents((7, 1, 30, 2, 13, 5, 64, 3, 3, 22, 9, 41))}
    assert whole["tokens_BL"].shape == (8, 16)
    for tokens, labels, mask, positions, documents in zip(
        *(whole[name].tolist() for name in ("tokens_BL", "labels_BL", "mask_BL", "positions_BL", "documents_BL")),
        strict=True,
    ):
        assert labels[:-1] == tokens[1:]
        assert mask == [token != EOS for token in tokens]
        expected_documents = [0]
        expected_positions = [0]
        for before in tokens[:-1]:
            new = before == EOS
            expected_documents.append(expected_documents[-1] + new)
            expected_positions.append(0 if new else expected_positions[-1] + 1)
        assert documents == expected_documents
        assert positions == expected_positions
        for token, label in zip(tokens, labels, strict=True):
            assert token == EOS or label == (EOS if token in ends else token + 1)
    assert not whole["continues_B"].any()
    types = [whole[name].dtype for name in ("tokens_BL", "labels_BL", "positions_BL", "mask_BL", "documents_BL")]
    assert types == [torch.int64] * 3 + [torch.bool, torch.int32]


@pytest.mark.parametrize("documents", Documents)
def test_document_boundaries_move_with_a_batch(toy: TokenFolder, documents: Documents) -> None:
    """Boundaries are moved with a batch and not computed again; a batch of other rows does not take them over."""
    for batch in Loader(sources_of((toy, "text", 1)), order_of(documents=documents)).micro_batches(4):
        seq = batch.seq
        rows = len(batch.tokens_BL)
        begins = [16 * row + first for row, spans in enumerate(seq.spans()) for first, _ in spans]
        moved = batch.moved(torch.clone).seq
        assert moved._spans == seq.spans()
        if documents is Documents.isolate:
            assert seq.boundaries_E is not None
            assert seq.boundaries_E.tolist() == [*begins, 16 * rows]
            assert moved.boundaries_E is not None
            assert torch.equal(moved.boundaries_E, seq.boundaries_E)
        else:
            assert seq.boundaries_E is moved.boundaries_E is None
        first = batch.map(lambda tensor: tensor[:1]).seq
        assert first.boundaries_E is None
        assert first.spans() == seq.spans()[:1]


@pytest.mark.parametrize("order", Order)
def test_join_reads_the_same_tokens_as_one_stream(toy: TokenFolder, order: Order):
    apart, together = (
        joined(Loader(sources_of((toy, "text", 1)), order_of(order, d)).micro_batches(4)) for d in Documents
    )
    assert torch.equal(together["tokens_BL"], apart["tokens_BL"])
    assert torch.equal(together["labels_BL"], apart["labels_BL"])
    assert together["mask_BL"].all()
    assert "documents_BL" not in together
    first = 4 * 16 if order is Order.lanes else 0
    assert together["positions_BL"].tolist() == [list(range(first, first + 16))] * 8
    assert together["continues_B"].tolist() == [order is Order.lanes] * 8


lengths = st.lists(st.integers(1, 90), min_size=3, max_size=40).filter(lambda drawn: sum(drawn) > 40)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, lengths, st.integers(0, 2**40), st.sampled_from(MODES), st.integers(0, 60), st.integers(17, 400))
def test_rows_are_the_same_for_every_number_of_ranks_and_from_every_step(
    make_folder: Callable[..., TokenFolder],
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    second: list[int],
    seed: int,
    mode: tuple[Order, Documents],
    start: int,
    shuffle: int,
):
    """Global order, masks and lanes, over epoch boundaries: these toys have a few hundred tokens, a step reads 128."""
    name = tmp_path_factory.mktemp("toys").name
    a = make_folder(first, name=f"{name}a", vocab=9999)
    b = make_folder(second, name=f"{name}b", vocab=9999)
    reading = order_of(*mode, seed=seed, shuffle=shuffle)

    def loaders(ranks: int) -> list[Loader]:
        sources = sources_of((a, "text", 0.7), (b, "text", 0.3))
        return [Loader(sources, reading, rank=rank, ranks=ranks) for rank in range(ranks)]

    (whole,) = loaders(1)
    expected = [whole.micro_batches(step) for step in range(start, start + 3)]
    for ranks in (2, 4):
        resumed = [list(loader.iterate(start, start + 3)) for loader in loaders(ranks)]
        for step, batches in enumerate(expected):
            assert same([batch for of_rank in resumed for batch in of_rank[step]], batches)
    assert same(loaders(1)[0].micro_batches(start + 2), expected[2])


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_micro_batch_does_not_change_the_order(toy: TokenFolder, micro_batch: int):
    sources = sources_of((toy, "text", 1))
    usual = Loader(sources, order_of())
    other = Loader(sources, order_of(micro_batch=micro_batch))
    for step in (9, 0, 5):
        assert same(other.micro_batches(step), usual.micro_batches(step))


def test_worker_processes_read_what_a_thread_reads(make_folder: Callable[..., TokenFolder]):
    sources = sources_of((make_folder(masked=True), "text", 1))
    for order, documents in ((Order.windows, Documents.isolate), (Order.lanes, Documents.join)):
        loader = Loader(sources, order_of(order, documents), Ahead(workers=2), rank=1, ranks=2)
        random = torch.get_rng_state()
        steps = list(loader.iterate(3, 8))
        assert torch.equal(torch.get_rng_state(), random)  # or training would depend on how often it was started
        assert len(steps) == 5
        for step, batches in enumerate(steps, start=3):
            assert same(batches, loader.micro_batches(step))


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, st.integers(0, 2**40), st.integers(17, 400))
def test_lanes_reproduce_the_recurrence_over_whole_documents(
    make_folder: Callable[..., TokenFolder],
    tmp_path_factory: pytest.TempPathFactory,
    of_documents: list[int],
    seed: int,
    shuffle: int,
):
    """Compute h = a h + token mod p, reset at a document's start and carried when a row continues: any slip shows."""
    folder = make_folder(of_documents, name=tmp_path_factory.mktemp("toys").name, vocab=9999)
    whole = {}
    for document in toy_documents(of_documents):
        h = 0
        for token in [*document.tolist(), EOS]:
            h = advance(h, token)
            whole[int(document[0]), h] = token
    loader = Loader(sources_of((folder, "text", 1)), order_of(Order.lanes, seed=seed, shuffle=shuffle))
    carried = [0] * 8
    begun = [0] * 8
    for step in range(12):
        batch = joined(loader.micro_batches(step))
        for lane in range(8):
            h = carried[lane] if batch["continues_B"][lane] else 0
            tokens = batch["tokens_BL"][lane].tolist()
            positions = batch["positions_BL"][lane].tolist()
            documents = batch["documents_BL"][lane].tolist()
            for place, (token, position) in enumerate(zip(tokens, positions, strict=True)):
                if place and documents[place] != documents[place - 1]:
                    h = 0
                begun[lane] = token if position == 0 else begun[lane]
                h = advance(h, token)
                assert whole[begun[lane], h] == token
            carried[lane] = h


def advance(h: int, token: int) -> int:
    return (h * 48_271 + token + 1) % 2_147_483_647


def test_every_token_is_read_once_an_epoch(toy: TokenFolder):
    """Windows: 212 tokens are 13.25 rows of 16, 53 rows in 4 epochs; the rows of each are shuffled among themselves."""
    loader = Loader(sources_of((toy, "text", 1)), order_of())
    tokens = torch.cat([joined(loader.micro_batches(step))["tokens_BL"].flatten() for step in range(7)])[: 53 * 16]
    assert np.bincount(tokens.numpy())[1:].tolist() == [4] * 200


def test_the_plan_shares_tokens_by_weight(make_folder: Callable[..., TokenFolder]):
    first = make_folder()
    second = make_folder(validation=(50,), name="other")
    sources = sources_of((first, "text", 3), (second, "text", 1))
    assert [(line.share, line.tokens) for line in reading_plan(sources.mixture, 1600)] == [
        (0.75, 1200),
        (0.25, 400),
    ]
    assert reading_plan(sources.mixture, 1600)[1].epochs == pytest.approx(400 / 212)


def test_a_closed_iterator_ends_its_threads(toy: TokenFolder):
    steps = Loader(sources_of((toy, "text", 1)), order_of()).iterate(0, 10**9)
    next(steps)
    assert reading_threads()
    steps.close()
    assert not reading_threads()


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetched")]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reading_error_is_raised_with_its_batch(toy: TokenFolder, workers: int):
    (toy.source_path("train", "text") / "part-00000" / "shard.00000.mds").write_bytes(bytes(500))
    loader = Loader(sources_of((toy, "text", 1)), order_of(), Ahead(workers=workers))
    with pytest.raises(RuntimeError, match=r"shard\.00000\.mds"):
        list(loader.iterate(0, 9))
    assert not reading_threads()


def test_the_fingerprint_names_differing_settings(toy: TokenFolder, make_folder: Callable[..., TokenFolder]):
    def fingerprint(folder: TokenFolder = toy, weight: float = 1, **changes: object) -> dict[str, str]:
        return Loader(sources_of((folder, "text", weight)), order_of(**changes)).fingerprint  # type: ignore[arg-type]

    def changed(other: dict[str, str]) -> set[str]:
        return {key for key, value in fingerprint().items() if other[key] != value}

    assert changed(fingerprint(make_folder(validation=(50,), name="other"))) == {"tokens"}
    assert changed(fingerprint(weight=2)) == {"tokens"}
    assert changed(fingerprint(documents=Documents.join)) == {"data.documents"}
    assert changed(fingerprint(order=Order.lanes)) == {"data.order"}
    assert changed(fingerprint(seq_len=8, seed=8)) == {"seq_len", "seed"}
    assert not changed(fingerprint(micro_batch=4))


def test_lanes_that_micro_batches_cannot_share_are_refused(toy: TokenFolder):
    with pytest.raises(ValueError, match=r"8 lanes .*micro_batch=3"):
        Loader(sources_of((toy, "text", 1)), order_of(micro_batch=3))


def test_mean_stretch_counts_documents_and_rows(toy: TokenFolder):
    """12 documents of 212 tokens."""

    def stretch(order: Order, documents: Documents) -> float:
        return Loader(sources_of((toy, "text", 1)), order_of(order, documents)).mean_stretch

    assert stretch(Order.windows, Documents.join) == 16
    assert stretch(Order.lanes, Documents.isolate) == pytest.approx(212 / 12)
    assert stretch(Order.windows, Documents.isolate) == pytest.approx(1 / (1 / 16 + 12 / 212))
    assert stretch(Order.lanes, Documents.join) == float("inf")


def held_out_rows(
    sources: Sources, documents: Documents, seq_len: int, tokens: int, piece: int
) -> dict[str, torch.Tensor]:
    return joined([batch.read() for batch in held_out(sources, documents, seq_len, tokens, 3, piece)])


def test_held_out_reads_the_same_text_at_every_length(toy: TokenFolder):
    documents = toy_documents((11, 4, 25))
    stored = [token for document in documents for token in [*document.tolist(), EOS]]  # 43 tokens
    sources = sources_of((toy, "text", 1))
    short = held_out_rows(sources, Documents.isolate, 10, 40, 20)
    long = held_out_rows(sources, Documents.isolate, 20, 40, 20)
    assert short["tokens_BL"].shape == (4, 10)
    assert long["tokens_BL"].shape == (2, 20)
    assert short["tokens_BL"].flatten().tolist() == long["tokens_BL"].flatten().tolist() == stored[:40]
    assert short["mask_BL"].flatten().tolist() == [token != EOS for token in stored[:40]]
    third = held_out_rows(sources, Documents.isolate, 15, 40, 20)["tokens_BL"]
    assert third.tolist() == [stored[:15], stored[20:35]]  # what does not divide a piece leaves its rest out


def test_held_out_is_spread_over_the_split(make_folder: Callable[..., TokenFolder]):
    """A row's tokens show its position in the split, which has one token after another.

    Rows from the start alone would have only the first documents.
    """
    sources = sources_of((make_folder(validation=(120,)), "text", 1))
    first = {
        tokens: held_out_rows(sources, Documents.join, 5, tokens, 10)["tokens_BL"][:, 0].tolist()
        for tokens in (10, 20, 30, 1000)
    }
    assert first[10] == [61, 66]
    assert first[20] == [31, 36, 91, 96]
    assert first[30] == [21, 26, 61, 66, 101, 106]
    assert first[1000] == list(range(1, 120, 5))


def test_held_out_rows_of_several_sources_by_weight(toy: TokenFolder, make_folder: Callable[..., TokenFolder]):
    other = make_folder(validation=(60,), name="other")
    none = make_folder(validation=(), name="none")
    sources = sources_of((toy, "text", 1), (other, "text", 3), (none, "text", 5))
    batches = held_out(sources, Documents.join, 10, 60, 3, 10)
    firsts = [(batch.source, batch.read().tokens_BL[:, 0].tolist()) for batch in batches]
    assert firsts == [("a", [19]), ("b", [1, 21, 31]), ("b", [51])]


def test_held_out_of_a_split_that_is_shorter_than_a_piece(toy: TokenFolder):
    assert held_out_rows(sources_of((toy, "text", 1)), Documents.join, 10, 100, 80)["tokens_BL"].shape == (4, 10)


def test_held_out_rows_come_in_batches(toy: TokenFolder):
    batches = [batch.read() for batch in held_out(sources_of((toy, "text", 1)), Documents.join, 10, 10**6, 3, 10)]
    assert [len(b.tokens_BL) for b in batches] == [3, 1]
    assert all(b.seq.documents_BL is None and b.mask_BL.all() for b in batches)


def test_ranks_read_their_own_held_out_batches_alone(toy: TokenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows are four batches: three data-parallel ranks take two each, and the last one has only masked rows."""
    batches = held_out(sources_of((toy, "text", 1)), Documents.join, 10, 10**6, 1, 10)
    whole = [batch.read().tokens_BL.tolist() for batch in batches]
    reads: list[int] = []
    monkeypatch.setattr(HeldOutBatch, "read", lambda batch, read=HeldOutBatch.read: reads.append(1) or read(batch))
    learned = []
    for rank in range(3):
        place: Any = SimpleNamespace(data=RankGroup(3, rank), pipeline=RankGroup())
        own_batches = [batch for _, batch in shared_out(batches, 1, place)]
        assert len(own_batches) == 2
        learned += [batch.tokens_BL.tolist() for batch in own_batches if batch.mask_BL.any()]
    assert learned == whole
    assert len(reads) == 5, "each batch once, and one to mask"


def config_of(path: Path, source: Source, seq_len: int = 16, vocab_size: int = 999) -> Config:
    phases = [PhaseConfig(tokens="1M", seq_len=seq_len, global_batch=4, micro_batch=2, lr=1e-3) for _ in range(2)]
    model = ModelConfig(width=8, vocab_size=vocab_size, pattern="M", layers={})
    data = DataConfig(source, str(path), cache=str(path.parent / "cache"), epochs=None)
    return Config(model=model, data=data, phases=phases, run=RunConfig(name="test", eval_lengths=[1]))


def test_build_loader_reads_a_folder(toy: TokenFolder):
    config = config_of(toy.path, Source.folder)
    first, second = map(build_loader, resolve(config))
    assert first.fingerprint["seed"] == str(phase_seed(config.run.seed, 0))
    assert first.fingerprint != second.fingerprint
    assert first.sources.names == ["text"]


def test_build_loader_refuses_another_vocabulary(toy: TokenFolder):
    with raises_code(ConfigError, "mismatch"):
        build_loader(resolve(config_of(toy.path, Source.folder, vocab_size=400))[0])


def test_build_loader_prepares_the_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [Document(f"text {name} " * 99, "text", name) for name in (f"topics/{i}" for i in range(60))]
    monkeypatch.setattr(corpus, "documents", lambda: texts)
    sources: Sources = build_loader(
        resolve(config_of(tmp_path / "embedded", Source.embedded, vocab_size=400))[0]
    ).sources
    assert sources.mixture[0].folder.manifest.origin["asked_vocab_size"] == 400
    with raises_code(ConfigError, "does-not-fit"):
        build_loader(resolve(config_of(tmp_path / "embedded", Source.embedded, seq_len=10_000, vocab_size=400))[0])


def test_a_token_beyond_the_vocabulary_is_located(toy: TokenFolder):
    """A manifest that claims a smaller vocabulary than the shards were made with."""
    small = replace(toy, manifest=replace(toy.manifest, vocab_size=150))
    loader = Loader(sources_of((small, "text", 1)), order_of())
    with pytest.raises(DataError, match=r"shard train/text/part-00000/shard\.\d+\.mds: document \d+ \(sample \d+"):
        [loader.micro_batches(step) for step in range(2)]
