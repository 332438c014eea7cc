"""The store: the same tokens wherever they come from, verified once, evicted in order, shared by processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import FolderError
from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DataError, DocumentStore
from hybridtron.storage import cache as cache_module
from hybridtron.storage.cache import make_room
from hybridtron.storage.digest import digest_of
from tests.data.mds import stores
from tests.data.mds.stores import DOCUMENTS, EOS, check_whole, make_documents, opened, quick, write
from tests.refusals import raises_code
from tests.storage.s3_server import FakeS3, environment

# the fixtures
bucket = stores.bucket
s3 = stores.s3

ROOT = Path(__file__).parents[3]


def cached_bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*.mds") if ".verified" not in file.parts)


def counted_digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the digests computed from now on, for data of more than 1,000 bytes."""
    counted: list[str] = []

    def counting(data: bytes) -> str:
        counted.append(digest_of(data))
        return counted[-1]

    monkeypatch.setattr(cache_module, "digest_of", lambda data: counting(data) if len(data) > 1000 else digest_of(data))
    return counted


@pytest.mark.parametrize("form", ["plain", "zstd"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "s3"])
def test_every_form_and_place_gives_the_same_tokens(s3: FakeS3, tmp_path: Path, form: str, remote: bool):
    cache = quick(tmp_path)
    folder = open_folder(f"s3://bucket/{form}" if remote else str(s3.root / form), cache)
    check_whole(DocumentStore(folder, "train", "web", cache), DOCUMENTS[:45])
    check_whole(DocumentStore(folder, "train", "code", cache), DOCUMENTS[45:85])
    check_whole(DocumentStore(folder, "validation", "web", cache), DOCUMENTS[85:])
    assert (cached_bytes(tmp_path) > 0) == (remote or form == "zstd")
    assert not list(tmp_path.rglob("*.zstd"))
    assert not [file for file in tmp_path.glob("*/.staging/**/*") if file.is_file()]


def test_spans_are_read_and_spans_outside_are_refused(s3: FakeS3, tmp_path: Path):
    store = opened(s3.root / "plain", quick(tmp_path))
    draw = np.random.default_rng(1)
    for number in draw.integers(0, 45, 200).tolist():
        whole = np.append(DOCUMENTS[number], EOS)
        first = int(draw.integers(0, len(whole)))
        count = int(draw.integers(0, len(whole) - first + 1))
        assert np.array_equal(store.read(number, first, count), whole[first : first + count])
    assert store.shard_documents.sum() == 45
    assert store.shard_tokens.sum() == sum(len(document) + 1 for document in DOCUMENTS[:45])
    assert store.shard_of(0) == 0
    assert store.shard_of(int(store.shard_documents[0])) == 1
    assert store.shard_of(44) == len(store.shard_documents) - 1
    for document, first, count in [(45, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, len(DOCUMENTS[0]) + 2), (0, 1, -1)]:
        with pytest.raises(IndexError, match="document"):
            store.read(document, first, count)


def test_reading_in_place_needs_no_torch(s3: FakeS3, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from hybridtron.data.mds.opening import *; "
        "from hybridtron.data.mds.store import *; from hybridtron.storage.cache import CacheOptions\n"
        f"cache = CacheOptions(Path({str(tmp_path)!r}))\n"
        f"DocumentStore(open_folder({str(s3.root / 'plain')!r}, cache), 'train', 'web', cache).read(0, 0, 1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_second_opening_fetches_the_manifest_alone(s3: FakeS3, tmp_path: Path):
    check_whole(opened("s3://bucket/plain", quick(tmp_path)), DOCUMENTS[:45])
    s3.downloads.clear()
    check_whole(opened("s3://bucket/plain/", quick(tmp_path)), DOCUMENTS[:45])
    assert +s3.downloads == {"plain/manifest.json": 1}


def test_prepare_fetches_every_shard_in_advance(s3: FakeS3, tmp_path: Path):
    store = opened("s3://bucket/plain", quick(tmp_path))
    s3.downloads.clear()
    store.prepare(range(len(store.shard_documents)))
    assert len(+s3.downloads) == len(store.shard_documents)
    s3.fail("lost", ".")
    check_whole(store, DOCUMENTS[:45])


@pytest.mark.parametrize("form", ["plain", "zstd"])
def test_digests_are_computed_once_per_file(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str):
    hashed = counted_digests(monkeypatch)
    store = opened(s3.root / form, quick(tmp_path))
    check_whole(store, DOCUMENTS[:45])
    assert len(hashed) == len(store.shard_documents)
    check_whole(opened(s3.root / form, quick(tmp_path)), DOCUMENTS[:45])
    assert len(hashed) == len(store.shard_documents)


def test_a_changed_file_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "data")
    store = opened(tmp_path / "data", quick(tmp_path / "cache"))
    check_whole(store, DOCUMENTS[:45])
    hashed = counted_digests(monkeypatch)
    shard = next((tmp_path / "data/train/web").rglob("*.mds"))
    shard.touch()
    check_whole(opened(tmp_path / "data", quick(tmp_path / "cache")), DOCUMENTS[:45])
    assert len(hashed) == 1
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match="differs from its digest"):
        check_whole(opened(tmp_path / "data", quick(tmp_path / "cache")), DOCUMENTS[:45])


def test_a_local_folder_needs_no_cache_that_can_be_written(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hashed = counted_digests(monkeypatch)
    (tmp_path / "file").write_text("")
    store = opened(s3.root / "plain", quick(tmp_path / "file" / "cache"))
    for _ in range(2):
        check_whole(store, DOCUMENTS[:45])
        store._mapped.clear()
    assert len(hashed) == len(store.shard_documents)


def largest_shard(store: DocumentStore) -> int:
    splits = store.folder.manifest.splits.values()
    shards = [shard for sources in splits for of_source in sources.values() for shard in of_source.shards]
    return max(shard.size + (shard.packed or 0) for shard in shards)


@pytest.mark.parametrize("path", ["{root}/zstd", "s3://bucket/plain"])
def test_the_cache_stays_within_its_limit(s3: FakeS3, tmp_path: Path, path: str):
    path = path.format(root=s3.root)
    free = quick(tmp_path / "free")
    limit = 4 * largest_shard(opened(path, free))
    cache = quick(tmp_path / "cache", limit)
    stores = [opened(path, cache), opened(path, cache, "code")]
    draw = np.random.default_rng(2)
    most = 0
    for _ in range(40):
        source = int(draw.integers(0, 2))
        number = int(draw.integers(0, 40))
        document = DOCUMENTS[number + 45 * source]
        assert np.array_equal(stores[source].read(number, 0, len(document)), document)
        most = max(most, cached_bytes(cache.folder))
    assert limit / 2 < most <= limit
    assert sum(len(store._mapped) for store in stores) <= 2 * 8  # what is evicted is unmapped, or it would take disk
    stores[0].prepare(range(len(stores[0].shard_documents)))
    assert cached_bytes(cache.folder) <= limit


def test_the_least_recently_used_shard_is_evicted_first(tmp_path: Path):
    path = tmp_path / "data"
    write(path, make_documents(200), "zstd:3")
    cache = quick(tmp_path / "cache", 4 * largest_shard(opened(path, quick(tmp_path / "free"))))
    store = opened(path, cache)
    second = opened(path, cache)
    sizes, needed = zip(*((shard.size, shard.size + (shard.packed or 0)) for shard in store._shards), strict=True)
    assert cache.limit
    fit = next(n for n in range(1, len(sizes)) if sum(sizes[:n]) + needed[n] > cache.limit)
    for number in range(fit):
        store.prepare([number])
    entry = store._entry
    for age, number in enumerate(reversed(range(fit))):  # shard 0 was used last
        mark = entry._mark_file(f"train/web/{store._shards[number].file}")
        os.utime(mark, ns=(age + 1, age + 1))
    held = second.read(0, 0, 1)
    store.prepare([fit])
    cached = [(entry.root / "train/web" / shard.file).exists() for shard in store._shards]
    assert cached[: fit + 1] == [True] * (fit - 1) + [False, True]
    store.prepare(range(1, len(sizes)))
    assert held == second.read(0, 0, 1)  # evicted or not, it is mapped


def test_a_limit_that_is_too_low_is_refused(s3: FakeS3, tmp_path: Path):
    least = 0
    for path in (str(s3.root / "zstd"), "s3://bucket/zstd"):
        with raises_code(FolderError, "out-of-range", "data.cache_limit=1000") as error:
            open_folder(path, quick(tmp_path, 1000))
        least = int(str(error.value).split()[-3])
        open_folder(path, quick(tmp_path, least))
    with raises_code(FolderError, "out-of-range", "data.cache_limit"):
        open_folder(str(s3.root / "zstd"), quick(tmp_path, least - 1))
    open_folder(str(s3.root / "plain"), quick(tmp_path, 1000))  # it is read in place


def test_threads_share_a_store(s3: FakeS3, tmp_path: Path):
    store = opened("s3://bucket/zstd", quick(tmp_path))
    faults: list[BaseException] = []

    def read() -> None:
        try:
            check_whole(store, DOCUMENTS[:45])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    shards = {key: times for key, times in (+s3.downloads).items() if "/web/part" in key}
    assert set(shards.values()) == {1}


CHILD = """
import sys
from pathlib import Path
from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DocumentStore
from hybridtron.storage.retry import RetryPolicy
from hybridtron.storage.cache import CacheOptions
for line in sys.stdin:
    cache = CacheOptions(Path(line.strip()), None, RetryPolicy(20, 1))
    store = DocumentStore(open_folder("s3://bucket/plain", cache), "train", "web", cache)
    read = [store.read(number, 0, length) for number, length in enumerate(store.lengths)]
    print(sum(int(tokens.sum()) for tokens in read), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def other(bucket: FakeS3) -> Iterator[subprocess.Popen[str]]:
    """Start another process that reads the full folder through a cache; its path is sent to the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env={**os.environ, **environment(bucket.url), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def read_there(process: subprocess.Popen[str], cache: Path) -> None:
    assert process.stdin
    process.stdin.write(f"{cache}\n")
    process.stdin.flush()


def test_two_processes_share_a_cache(s3: FakeS3, tmp_path: Path, other: subprocess.Popen[str]):
    s3.delay = 0.02
    read_there(other, tmp_path)
    store = opened("s3://bucket/plain", quick(tmp_path))
    check_whole(store, DOCUMENTS[:45])
    assert other.stdout
    assert int(other.stdout.readline()) == sum(int(document.sum()) for document in DOCUMENTS[:45])
    fetched = {key: times for key, times in (+s3.downloads).items() if key != "plain/manifest.json"}
    assert len([key for key in fetched if "/web/part" in key]) == len(store.shard_documents)
    assert set(fetched.values()) == {1}  # each file was fetched by one of them


def test_a_killed_download_does_not_block_others(s3: FakeS3, tmp_path: Path, other: subprocess.Popen[str]):
    s3.fail("dribble", r"train/web/.*shard.00002")
    read_there(other, tmp_path)
    staging = ".staging/train/web/part-00000/shard.00002.mds"
    for _ in range(6000):
        if list(tmp_path.glob(f"*/{staging}/*")):
            break
        threading.Event().wait(0.02)
    else:
        raise AssertionError("the download did not begin")
    other.kill()
    other.wait()
    assert list(tmp_path.glob(f"*/{staging}"))
    s3.faults.clear()
    check_whole(opened("s3://bucket/plain", quick(tmp_path)), DOCUMENTS[:45])
    assert not list(tmp_path.glob(f"*/{staging}"))


def test_reservations_of_a_killed_process_are_freed(s3: FakeS3, tmp_path: Path):
    path = s3.root / "zstd"
    cache = quick(tmp_path / "cache", 4 * largest_shard(opened(path, quick(tmp_path / "free"))))
    store = opened(path, cache)
    left = store._entry.root / ".staging/train/code/part-00000/shard.00000.mds"
    left.mkdir(parents=True)
    (left / ".reserved").write_text(str(cache.limit))
    check_whole(store, DOCUMENTS[:45])
    assert not left.exists()


def test_no_file_is_evicted_when_reservations_alone_fill_the_cache(tmp_path: Path):
    """A fetch waits for other processes' fetches; deleting verified files cannot give it room."""
    path = tmp_path / "data"
    write(path, compression="zstd:3")
    largest = largest_shard(opened(path, quick(tmp_path / "free")))
    cache = quick(tmp_path / "cache", 4 * largest)
    store = opened(path, cache)
    store.prepare([0])
    entry = store._entry
    key = "train/web/part-00000/shard.00001.mds"
    with entry.lock(key, 1), entry.staging(key) as folder:
        (folder / ".reserved").write_text(str(3 * largest + 1))
        assert not make_room(entry.options, largest)
        assert (entry.root / "train/web/part-00000/shard.00000.mds").exists()
        (folder / ".reserved").write_text(str(3 * largest))
        assert make_room(entry.options, largest)
        assert not (entry.root / "train/web/part-00000/shard.00000.mds").exists()
