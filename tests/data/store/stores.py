"""What the tests of the store share: a folder in two forms, a bucket that holds it, and a way to look at all of it.

A test module takes the fixtures with `bucket, s3 = stores.bucket, stores.s3`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import numpy as np
import pytest
from botocore.config import Config

from hybridtron.data.prepare.writer import write_folder
from hybridtron.data.store import cache, fetch
from hybridtron.data.store.shards import CacheOptions, Store, open_folder
from tests.data.store.s3_server import Store as S3
from tests.data.store.s3_server import serve

EOS, VOCAB = 0, 901


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
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A store with the same folder twice: plain and compressed."""
    root = tmp_path_factory.mktemp("bucket")
    write(root / "plain")
    write(root / "zstd", compression="zstd:3")
    with serve(root) as store:
        yield store


class OneSession:
    """boto3's Session, made once: a new one parses megabytes of JSON, which is most of what these tests would do."""

    shared = boto3.session.Session()
    lock = threading.Lock()

    def client(self, name: str, config: Config, endpoint_url: str | None) -> object:
        with self.lock:
            return self.shared.client(name, config=config, endpoint_url=endpoint_url)


@pytest.fixture
def s3(bucket: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The store without faults, and boto3 pointed at it."""
    monkeypatch.setattr(boto3.session, "Session", OneSession)
    for module in (cache, fetch):
        monkeypatch.setattr(module, "PAUSE", 0.05)
    bucket.faults.clear()
    bucket.downloads.clear()
    bucket.delay = 0.0
    for name, value in environment(bucket.url).items():
        monkeypatch.setenv(name, value)
    return bucket


def environment(url: str) -> dict[str, str]:
    return {
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # the retries that are tested are ours
        "AWS_CONFIG_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


def quick(folder: Path, limit: int | None = None) -> CacheOptions:
    return CacheOptions(folder, limit, timeout=5, retries=1)


def opened(path: str | Path, cache: CacheOptions, source: str = "web", split: str = "train") -> Store:
    """A store that may be impatient; the folder is opened patiently, since other tests may take the processor."""
    folder = open_folder(str(path), replace(cache, timeout=max(cache.timeout, 5)))
    return Store(folder, split, source, cache)


def check_whole(store: Store, documents: list[np.ndarray]) -> None:
    assert len(store.lengths) == len(documents)
    for number, document in enumerate(documents):
        tokens = store.read(number, 0, len(document) + 1)
        assert tokens.dtype == np.uint16
        assert np.array_equal(tokens[:-1], document)
        assert tokens[-1] == EOS
