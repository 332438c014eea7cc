"""The client of buckets when a store fails, is slow, is absent, or redirects: it ends in StorageError.

Consequences of wrong bytes are tested where the right ones are known: tests/data/mds for shards, tests/checkpoint for
copies.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hybridtron.storage import s3
from hybridtron.storage.retry import ObjectMissingError, RetryPolicy, StorageError, with_retries
from hybridtron.storage.s3 import Bucket
from tests.storage.s3_server import FakeS3, point_at, serve

URL = "s3://bucket/runs/small"
CONTENT = bytes(range(256)) * 40
BOUND_S = 20.0  # far above what one attempt takes, and below what a fault that is waited for would
HASTY = RetryPolicy(timeout=1.0, retries=0, slowest=2**40)
PATIENT = RetryPolicy(timeout=60.0, retries=0)  # where nothing fails, and other tests may take the processor


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A store that holds one object, `there`."""
    file = tmp_path / "bucket/runs/small/there"
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    with serve(tmp_path / "bucket") as running:
        point_at(running.url, monkeypatch)
        yield running


def bring(bucket: Bucket, into: Path, patience: RetryPolicy) -> bytes:
    return with_retries(patience, len(CONTENT), "fetched", lambda: bucket.bring("there", into)).read_bytes()


def test_written_objects_are_read_back(store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(f"{URL}/", PATIENT)
    large = os.urandom(9 * 2**20)
    (tmp_path / "large").write_bytes(large)
    bucket.put("a/small", b"some bytes")
    bucket.put_file("large", tmp_path / "large")
    assert store.uploads_in_parts == 1
    assert bucket.small("a/small", 10) == b"some bytes"
    assert bucket.small("nothing", 10) is None
    assert b"".join(bucket.pieces("large")) == large
    assert bucket.bring("large", tmp_path / "new/folder/copy").read_bytes() == large
    monkeypatch.setattr(s3, "BLOCK_BYTES", 1000)
    assert [len(piece) for piece in bucket.pieces("there")] == [1000] * 10 + [240]
    assert (store.root / "runs/small/a/small").read_bytes() == b"some bytes"


@pytest.mark.parametrize(
    ("fault", "timeout", "named"),
    [
        ("refuse", 60.0, "SlowDown"),
        ("reset", 60.0, "Connection"),
        ("cut", 60.0, "IncompleteRead"),
        ("lost", 60.0, "NoSuchKey"),
        ("dribble", 1.0, "after 1 s"),
        ("silent", 1.0, "after 1 s|timeout"),
    ],
)
def test_permanent_fault_ends_in_an_error(
    store: FakeS3, tmp_path: Path, fault: str, timeout: float, named: str
) -> None:
    store.fail(fault, "there")
    bucket = Bucket(URL, RetryPolicy(timeout, retries=0, slowest=2**40))
    began = time.monotonic()
    with pytest.raises(StorageError, match=named) as refused:
        list(bucket.pieces("there"))
    assert isinstance(refused.value, ObjectMissingError) == (fault == "lost")
    patient = RetryPolicy(timeout, retries=1, slowest=2**40)
    with pytest.raises(StorageError, match=named):
        bring(Bucket(URL, patient), tmp_path / "copy", patient)
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize(("fault", "timeout"), [("refuse", 60.0), ("reset", 60.0), ("cut", 60.0), ("dribble", 3.0)])
def test_temporary_fault_is_survived(store: FakeS3, tmp_path: Path, fault: str, timeout: float) -> None:
    store.fail(fault, "there", times=1)
    patience = RetryPolicy(timeout, retries=3)
    assert bring(Bucket(URL, patience), tmp_path / "copy", patience) == CONTENT
    assert store.downloads["runs/small/there"] >= 2


def test_uploads_are_retried_as_often_as_configured(store: FakeS3, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    store.fail("refuse", "new", times=2)
    with pytest.raises(StorageError, match=r"2 attempts, .*SlowDown"):
        Bucket(URL, RetryPolicy(retries=1)).put("new", b"x")
    store.fail("refuse", "new", times=2)
    Bucket(URL, RetryPolicy(retries=2)).put_file("new", tmp_path / "file")
    assert Bucket(URL, PATIENT).small("new", 2**20) == CONTENT


def test_missing_object_is_requested_once(store: FakeS3, tmp_path: Path) -> None:
    bucket = Bucket(URL, RetryPolicy(retries=5))
    with pytest.raises(ObjectMissingError, match="1 attempt"):
        with_retries(bucket.patience, 0, "fetched", lambda: bucket.bring("nothing", tmp_path / "copy"))
    assert store.downloads["runs/small/nothing"] == 1


def test_object_above_the_limit_is_not_read(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "BLOCK_BYTES", 100)
    bucket = Bucket(URL, PATIENT)
    assert bucket.small("there", len(CONTENT)) == CONTENT
    with pytest.raises(StorageError, match="1,000 bytes"):
        bucket.small("there", 1000)


def test_forked_bucket_opens_its_own_connections(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(URL, PATIENT)
    bucket.small("there", 2**20)
    parents = bucket._client
    assert bucket._client is parents
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    assert bucket._client is not parents


def test_missing_boto3_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"boto3 .*\[s3\]"):
        Bucket(URL, HASTY)


def test_closed_and_silent_ports_end_in_an_error(store: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{hole.getsockname()[1]}")
        for patience, message in [(PATIENT, "connect"), (HASTY, "after 1 s|timeout")]:
            if patience is HASTY:
                hole.listen(10)
            begin = time.monotonic()
            with pytest.raises(StorageError, match=message):
                Bucket(URL, patience).small("there", 10)
            assert time.monotonic() - begin < BOUND_S


@contextmanager
def answering(status: int, headers: Mapping[str, str], body: bytes) -> Iterator[tuple[str, list[str]]]:
    """Run a server with one answer to everything; yield its address and the list of its requests."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


ANSWERS = {
    "an internal error": (500, b"<html>sorry</html>"),
    "a full bucket": (507, b"<Error><Code>QuotaExceeded</Code><Message>full</Message></Error>"),
    "no right": (403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    "moved": (301, b"<Error><Code>PermanentRedirect</Code><Endpoint>ELSEWHERE</Endpoint></Error>"),
    "moved for now": (307, b"<Error><Code>TemporaryRedirect</Code><Endpoint>ELSEWHERE</Endpoint></Error>"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_redirects_and_errors_of_a_server_are_not_followed(
    kind: str, store: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, body = ANSWERS[kind]
    with answering(200, {}, b"") as (elsewhere, asked_elsewhere):
        body = body.replace(b"ELSEWHERE", elsewhere.removeprefix("http://").encode())
        headers = {}
        if status < 400:
            headers = {"Location": f"{elsewhere}/bucket", "x-amz-bucket-region": "eu-west-1"}
        with answering(status, headers, body) as (address, asked):
            monkeypatch.setenv("S3_ENDPOINT_URL", address)
            bucket = Bucket(URL, HASTY)
            for request in (lambda: list(bucket.pieces("there")), lambda: bucket.put("new", b"x")):
                with pytest.raises(StorageError):
                    request()
    assert asked
    assert not asked_elsewhere
