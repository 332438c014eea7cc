"""The loader against mosaicml-streaming's own: StreamingDataset in a DataLoader, on the same shards.

Both read the documents of one source in shuffled order, pack them into rows of L + 1 tokens without padding, and return
batches of tokens, labels, mask, document index and positions. The peer's rows are packed by a few lines of numpy, as
its users write them. Workers are processes, so times are wall-clock, from the first batch on. Two more measurements are
the time to the first batch at the start, the middle and near the end of a long phase, and the rate of preparing
documents, against the bare tokenizer on one core.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

from hybridtron.config.schema import Documents, Order
from hybridtron.data.loader import Ahead, Loader
from hybridtron.data.mixture_spec import MixtureSource
from hybridtron.data.order.phase_order import PhaseOrder
from hybridtron.data.prepare import corpus, embedded
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.vocabulary import open_vocabulary
from hybridtron.data.prepare.writer import write_folder
from hybridtron.data.sources import Sources
from hybridtron.proving.measuring import BenchReport, Seconds, times
from hybridtron.storage.cache import CacheOptions
from hybridtron.storage.mosaic import import_alone

SEQ_LEN = 2048
ROWS = 16
VOCABULARY = 32_000
EOS = 0
SHUFFLE = 2**26
BATCH = 64  # documents in a call of the bare tokenizer


def random_documents(count: int, mean: int) -> Iterator[np.ndarray]:
    """Yield random documents with very different lengths, as on the web."""
    random = np.random.default_rng(0)
    for length in np.maximum(1, random.lognormal(np.log(mean) - 0.5, 1.0, count).astype(int)):
        yield random.integers(1, VOCABULARY, length)


def written(path: Path, documents: int, mean: int) -> Sources:
    splits = {"train": {"text": random_documents(documents, mean)}, "validation": {}}
    folder = write_folder(path, splits, "{}", VOCABULARY, EOS, {})
    return Sources([MixtureSource("text", folder, "text", 1.0)], CacheOptions(path.parent / "cache"))


def loader_of(sources: Sources, seq_len: int, rows: int, workers: int) -> Loader:
    reading = PhaseOrder(Order.windows, Documents.isolate, seq_len, rows, rows, 0, SHUFFLE)
    return Loader(sources, reading, Ahead(workers))


def ours(sources: Sources, steps: int, workers: int) -> Seconds:
    return seconds_of(loader_of(sources, SEQ_LEN, ROWS, workers).iterate(0, steps), steps)


def seconds_of(batches: Iterator[Any], steps: int) -> Seconds:
    """Return the seconds from the first batch to the last; the start of workers, once a run, does not count."""
    next(batches)
    start = time.perf_counter()
    for _ in range(steps - 1):
        next(batches)
    return Seconds(time.perf_counter() - start)


class Packed(IterableDataset[Any]):
    """Batches of packed rows from StreamingDataset's iterator."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        tokens = []
        documents = []
        held = 0
        wanted = ROWS * (SEQ_LEN + 1)
        for number, sample in enumerate(self.dataset):
            tokens.append(sample["tokens"])
            documents.append(np.full(len(tokens[-1]), number))
            held += len(tokens[-1])
            if held >= wanted:
                both = [np.concatenate(parts) for parts in (tokens, documents)]
                yield batch_of(*(of_batch[:wanted].reshape(ROWS, -1) for of_batch in both))
                tokens, documents = ([of_batch[wanted:]] for of_batch in both)
                held -= wanted


def batch_of(tokens: np.ndarray, documents: np.ndarray) -> tuple[torch.Tensor, ...]:
    documents -= documents[:, :1]
    places = np.arange(SEQ_LEN)
    starts = np.where(documents[:, 1:-1] != documents[:, :-2], places[1:], 0)
    starts = np.concatenate([np.zeros((len(tokens), 1), starts.dtype), starts], axis=1)
    positions = places - np.maximum.accumulate(starts, axis=1)
    wide = torch.from_numpy(tokens.astype(np.int64))
    mask = torch.from_numpy(documents[:, :-1] == documents[:, 1:])
    return wide[:, :-1], wide[:, 1:], mask, torch.from_numpy(documents[:, :-1]), torch.from_numpy(positions)


def theirs(folder: Path, steps: int, workers: int) -> Seconds:
    """Time the peer from its first batch on.

    The dataset is new each time, as at the start of a run, and is stopped after `steps` batches.
    """
    dataset = import_alone("streaming.base.dataset").StreamingDataset(
        local=str(folder), shuffle=True, shuffle_algo="py1e", shuffle_block_size=SHUFFLE // 512, batch_size=ROWS,
        num_canonical_nodes=1,
    )  # fmt: skip
    loader = DataLoader(Packed(dataset), batch_size=None, num_workers=workers, prefetch_factor=2 if workers else None)
    return seconds_of(iter(loader), steps)


def first_batch(sources: Sources, seq_len: int, rows: int, step: int) -> Seconds:
    """Return the seconds from a new loader to the first batch of a step."""
    start = time.perf_counter()
    next(iter(loader_of(sources, seq_len, rows, 0).iterate(step, step + 1)))
    return Seconds(time.perf_counter() - start)


def data(report: BenchReport) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        read_speed(Path(scratch), report)
        resume_speed(Path(scratch), report)
        prepare_speed(Path(scratch), report)
    report.notes += [
        "reading is timed by the wall's clock, from the first batch on; what else ran on the machine counts",
        f"rows of {SEQ_LEN} tokens, {ROWS} a batch, documents of about 700 tokens, local uint16 shards, shuffled",
    ]


def read_speed(scratch: Path, report: BenchReport) -> None:
    documents = report.pick(full=60_000, quick=2_000)
    steps = report.pick(full=1_000, quick=20)
    sources = written(scratch / "speed", documents, 700)
    folder = sources.mixture[0].folder.source_path("train", "text")
    forms = {
        workers: {
            "ours": partial(ours, sources, steps, workers),
            "StreamingDataset": partial(theirs, folder, steps, workers),
        }
        for workers in (0, 1)
    }
    measured = report.sweep(forms)
    report.ratios("reading shuffled, packed rows", "workers", measured, [("StreamingDataset", "ours")], {})
    for workers, timings in measured.items():
        ratio = timings.ratio("StreamingDataset", "ours")
        report.at_least(f"tokens/s over StreamingDataset's, {workers} workers", 4.0, ratio)


def resume_speed(scratch: Path, report: BenchReport) -> None:
    """Measure the first batch at three places of a phase, with rows about as long as documents."""
    samples = report.pick(full=1_000_000, quick=10_000)
    sources = written(scratch / "resume", samples, 128)
    steps = samples // 64
    first_batch(sources, 128, 64, 1)
    seconds = {share: first_batch(sources, 128, 64, int(steps * share)) for share in (0.0, 0.5, 0.95)}
    cells = [(f"{share:.0%}", times(wait / seconds[0.0])) for share, wait in seconds.items()]
    title = f"from a new loader to its first batch, at a share of {samples:,} samples"
    report.table(title, ("at", "over the time at 0%"), cells)
    report.at_most("seconds between the three", 1.0, max(seconds.values()) - min(seconds.values()))


def prepare_speed(scratch: Path, report: BenchReport) -> None:
    """Measure preparation by one worker against the bare tokenizer on the same texts, by processor time."""
    texts = [document.content for document in corpus.documents() if isinstance(document.content, str)]
    texts = texts[:: report.pick(full=1, quick=20)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = embedded.train_tokenizer(texts, report.pick(full=32_000, quick=2_000))
    tokenizer.save(str(scratch / "tokenizer.json"))
    (scratch / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    inputs = find([str(scratch / "texts.jsonl")]).inputs
    vocabulary = open_vocabulary(scratch / "tokenizer.json")
    outputs = (scratch / f"prepared-{number}" for number in itertools.count())
    forms = {
        "bare tokenizer": lambda: bare(tokenizer, texts),
        "prepare": lambda: prepare(inputs, next(outputs), vocabulary),
    }
    timings = report.timed(forms)
    measured = {"jsonl": timings}
    title = "preparing, one worker, processor time"
    report.ratios(title, "format", measured, [("bare tokenizer", "prepare")], {})
    share = timings.ratio("bare tokenizer", "prepare")
    report.at_least("share of the bare tokenizer's rate, one core", 0.7, share)


def bare(tokenizer: Tokenizer, texts: list[str]) -> None:
    for first in range(0, len(texts), BATCH):
        tokenizer.encode_batch_fast(texts[first : first + BATCH], add_special_tokens=False)
