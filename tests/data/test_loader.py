"""The loader against rows that are put together here, one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config, DataConfig, Documents, ModelConfig, PhaseConfig, RunConfig, Source
from hybridtron.data import corpus
from hybridtron.data.batch import Batch
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import Loader, build_loader, held_out, phase_seed
from hybridtron.data.packing import ShuffledWindows


def loader_of(
    folder: TokenFolder, documents: Documents = Documents.isolate, micro_batch: int = 3, seed: int = 7
) -> Loader:
    return Loader(folder, documents, seq_len=16, global_batch=6, micro_batch=micro_batch, seed=seed)


def joined(batches: list[Batch]) -> Batch:
    """Micro-batches as one."""
    seqs = [b.seq for b in batches]
    indices = [s.documents_BL for s in seqs if s.documents_BL is not None]
    documents = torch.cat(indices) if indices else None
    first = batches[0]
    seq = replace(first.seq, positions_BL=torch.cat([s.positions_BL for s in seqs]), documents_BL=documents)
    tokens_BL, labels_BL = (torch.cat([getattr(b, name) for b in batches]) for name in ("tokens_BL", "labels_BL"))
    return Batch(tokens_BL, labels_BL, torch.cat([b.mask_BL for b in batches]), seq)


def equal(a: Batch, b: Batch) -> bool:
    pairs = [(a.tokens_BL, b.tokens_BL), (a.labels_BL, b.labels_BL), (a.mask_BL, b.mask_BL)]
    pairs.append((a.seq.positions_BL, b.seq.positions_BL))
    if a.seq.documents_BL is not None and b.seq.documents_BL is not None:
        pairs.append((a.seq.documents_BL, b.seq.documents_BL))
    same_kind = (a.seq.documents_BL is None) == (b.seq.documents_BL is None)
    return same_kind and all(torch.equal(x, y) for x, y in pairs)


def test_isolate(toy: TokenFolder):
    batch = joined(list(loader_of(toy).micro_batches(4)))
    documents_BL = batch.seq.documents_BL
    assert documents_BL is not None
    tokens, windows = toy.tokens("train"), ShuffledWindows(toy.lengths("train"), 16, 7)
    for lane in range(6):
        spans = windows.spans(4 * 6 + lane)
        row = [int(t) for s in spans for t in tokens[s.first : s.first + s.count]]
        assert batch.tokens_BL[lane].tolist() == row[:-1]
        assert batch.labels_BL[lane].tolist() == row[1:]
        assert batch.mask_BL[lane].tolist() == [t != 0 for t in row[:-1]]
        assert batch.seq.positions_BL[lane].tolist() == [p for s in spans for p in range(s.count)][:-1]
        assert documents_BL[lane].tolist() == [i for i, s in enumerate(spans) for _ in range(s.count)][:-1]
    types = [t.dtype for t in (batch.tokens_BL, batch.labels_BL, batch.seq.positions_BL)]
    assert types == [torch.int64] * 3
    assert (batch.mask_BL.dtype, documents_BL.dtype) == (torch.bool, torch.int32)


def test_join_reads_the_same_tokens_as_one_stream(toy: TokenFolder):
    apart = joined(list(loader_of(toy).micro_batches(4)))
    batch = joined(list(loader_of(toy, Documents.join).micro_batches(4)))
    assert torch.equal(batch.tokens_BL, apart.tokens_BL)
    assert torch.equal(batch.labels_BL, apart.labels_BL)
    assert batch.mask_BL.all()
    assert batch.seq.positions_BL.tolist() == [list(range(16))] * 6
    assert batch.seq.documents_BL is None


@pytest.mark.parametrize("micro_batch", [1, 2, 6])
def test_micro_batch_does_not_change_the_order(toy: TokenFolder, micro_batch: int):
    other = loader_of(toy, micro_batch=micro_batch)
    for step in (9, 0, 5):
        assert equal(joined(list(other.micro_batches(step))), joined(list(loader_of(toy).micro_batches(step))))


def test_iterate_reads_ahead_what_micro_batches_reads(toy: TokenFolder):
    loader = loader_of(toy)
    steps = list(loader.iterate(3, 9))
    assert len(steps) == 6
    for step, batches in enumerate(steps, start=3):
        assert equal(joined(batches), joined(list(loader.micro_batches(step))))
    assert not list(loader.iterate(3, 3))


def test_iterate_raises_what_its_thread_met_and_ends(toy: TokenFolder, monkeypatch: pytest.MonkeyPatch):
    loader = loader_of(toy)
    read = loader.micro_batches

    def failing(step: int) -> Iterator[Batch]:
        if step == 2:
            raise OSError("the disk is gone")
        return read(step)

    monkeypatch.setattr(loader, "micro_batches", failing)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(batches for batches in loader.iterate(0, 5))
    steps = loader.iterate(0, 5)
    next(steps), next(steps)
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert not reading_threads()


def test_iterate_ends_its_thread_when_it_is_left(toy: TokenFolder):
    steps = loader_of(toy).iterate(0, 10**9)
    next(steps)
    assert reading_threads()
    steps.close()
    assert not reading_threads()


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


def test_fingerprint_tells_orders_apart(toy: TokenFolder, make_folder: Callable[..., TokenFolder]):
    def fingerprint(
        folder: TokenFolder = toy,
        documents: Documents = Documents.isolate,
        length: int = 16,
        rows: int = 6,
        seed: int = 1,
    ) -> str:
        return Loader(folder, documents, length, rows, 2, seed).fingerprint

    other = make_folder(validation=(50,), name="other")
    changed = [fingerprint(other), fingerprint(documents=Documents.join), fingerprint(length=8), fingerprint(rows=8)]
    assert len({fingerprint(), fingerprint(seed=2), *changed}) == 6
    assert Loader(toy, Documents.isolate, 16, 6, 3, 1).fingerprint == fingerprint()


def test_micro_batch_must_divide_the_global_batch(toy: TokenFolder):
    with pytest.raises(ValueError, match="global_batch=6 is not a multiple of micro_batch=4"):
        loader_of(toy, micro_batch=4)


def test_held_out_reads_the_same_text_at_every_length(toy: TokenFolder):
    stored = toy.tokens("validation").tolist()  # 43 tokens
    short = joined(list(held_out(toy, Documents.isolate, 10, 40, micro_batch=3)))
    long = joined(list(held_out(toy, Documents.isolate, 20, 40, micro_batch=3)))
    assert short.tokens_BL.shape == (4, 10)
    assert long.tokens_BL.shape == (2, 20)
    assert short.tokens_BL.flatten().tolist() == long.tokens_BL.flatten().tolist() == stored[:40]
    assert short.mask_BL.flatten().tolist() == [t != 0 for t in stored[:40]]


def test_held_out_in_batches(toy: TokenFolder):
    batches = list(held_out(toy, Documents.join, 10, 10**6, micro_batch=3))
    assert [len(b.tokens_BL) for b in batches] == [3, 1]
    assert all(b.seq.documents_BL is None and b.mask_BL.all() for b in batches)


def config_of(path: Path, source: Source, seq_len: int = 16, vocab_size: int = 400) -> Config:
    phases = [PhaseConfig(tokens="1M", seq_len=seq_len, global_batch=4, micro_batch=2, lr=1e-3) for _ in range(2)]
    model = ModelConfig(width=8, vocab_size=vocab_size, pattern="M", layers={})
    return Config(model=model, data=DataConfig(source, str(path)), phases=phases, run=RunConfig(name="test"))


def test_build_loader_of_a_folder(toy: TokenFolder):
    config = config_of(toy.path, Source.folder)
    first, second = build_loader(config, 0), build_loader(config, 1)
    assert first.fingerprint == Loader(toy, Documents.isolate, 16, 4, 2, phase_seed(config.run.seed, 0)).fingerprint
    assert first.fingerprint != second.fingerprint


def test_build_loader_prepares_the_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [corpus.Document(name, f"text {name} " * 99) for name in (f"topics/{i}" for i in range(60))]
    monkeypatch.setattr(corpus, "documents", lambda: texts)
    config = config_of(tmp_path / "embedded", Source.embedded)
    assert build_loader(config, 0).folder.manifest.origin["asked_vocab_size"] == 400
    with pytest.raises(ConfigError, match=r"validation tokens, and one row takes 40001"):
        build_loader(config_of(tmp_path / "embedded", Source.embedded, seq_len=10_000), 0)
