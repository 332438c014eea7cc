"""Fixtures that the store's tests share: a folder in two forms, a bucket that holds it, and a reader for all of it.

A test module takes the fixtures with `bucket, s3 = stores.bucket, stores.s3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.prepare.writer import write_folder
from hybridtron.storage.cache import CacheOptions
from hybridtron.storage.retry import RetryPolicy
from tests.storage.s3_server import FakeS3, point_at, serve

EOS = 0
VOCAB = 901


def make_documents(count: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of 1 to 600 tokens, so that their shapes take one byte and two, and their tokens lie unaligned."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, VOCAB, draw.integers(1, 600)).astype(np.uint16) for _ in range(count)]


DOCUMENTS = make_documents(90)


def write(path: Path, documents: list[np.ndarray] = DOCUMENTS, compression: str | None = None) -> None:
    """A folder with two sources and a validation split, in several small shards."""
    half = len(documents) // 2
    splits = {
        "train": {"web": documents[:half], "code": documents[half:-5]},
        "validation": {"web": documents[-5:]},
    }
    write_folder(path, splits, "{}", VOCAB, EOS, {}, shard_size=6000, compression=compression)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeS3]:
    """A store with the same folder twice: plain and compressed."""
    root = tmp_path_factory.mktemp("bucket")
    write(root / "plain")
    write(root / "zstd", compression="zstd:3")
    with serve(root) as store:
        yield store


@pytest.fixture
def s3(bucket: FakeS3, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    """The store without faults, and boto3 pointed at it."""
    bucket.reset()
    point_at(bucket.url, monkeypatch)
    return bucket


def quick(folder: Path, limit: int | None = None) -> CacheOptions:
    return CacheOptions(folder, limit, RetryPolicy(timeout=30, retries=1))


def opened(path: str | Path, cache: CacheOptions, source: str = "web", split: str = "train") -> DocumentStore:
    """A store that may be impatient; the folder is opened patiently, since other tests may take the processor."""
    patient = replace(cache.patience, timeout=max(cache.patience.timeout, 60))
    folder = open_folder(str(path), replace(cache, patience=patient))
    return DocumentStore(folder, split, source, cache)


def check_whole(store: DocumentStore, documents: list[np.ndarray]) -> None:
    assert len(store.lengths) == len(documents)
    for number, document in enumerate(documents):
        tokens = store.read(number, 0, len(document) + 1)
        assert tokens.dtype == np.uint16
        assert np.array_equal(tokens[:-1], document)
        assert tokens[-1] == EOS
