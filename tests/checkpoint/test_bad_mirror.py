"""A store that fails, lies, is slow or sends elsewhere: nothing counts as copied, and it ends in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hybridtron.checkpoint import mirror
from hybridtron.checkpoint.folder import all_of
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.mirror import TROUBLE, Mirror, Store, download, upload
from hybridtron.parallel.groups import Groups
from tests.checkpoint.conftest import Write, trained
from tests.data.store import s3_server

URL = "s3://bucket/runs/small"
BOUND_S = 30.0  # far above what one attempt of each request takes


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setattr(mirror, "ATTEMPTS", 1)
    monkeypatch.setattr(mirror, "PATIENCE_S", 1.0)
    monkeypatch.setattr(mirror, "SLOWEST", 2**40)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Store]:
    with s3_server.serve(tmp_path / "bucket") as running:
        monkeypatch.setenv("S3_ENDPOINT_URL", running.url)
        yield running


@pytest.mark.parametrize("fault", ["refuse", "reset", "cut", "short", "flip", "lost", "dribble", "silent"])
def test_a_bad_store_is_reported_and_tried_again_with_the_next_checkpoint(
    fault: str, alone: Groups, write: Write, tmp_path: Path, store: s3_server.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = trained(alone)
    first, second = write(engine, 1), write(engine, 2)
    copy, began = Mirror(URL), time.monotonic()
    store.fail(fault, "optimizer-00000")
    copy.offer(first)
    copy.finish()
    assert time.monotonic() - began < BOUND_S
    assert str(first) in capsys.readouterr().err
    assert copy.in_use() == set()
    assert not list((tmp_path / "bucket").rglob("manifest.json"))
    assert not list((tmp_path / "bucket").rglob("latest"))
    store.faults.clear()
    copy.offer(second)
    copy.finish()
    assert capsys.readouterr().err == ""
    store.fail(fault, "optimizer-00000")
    began = time.monotonic()
    with pytest.raises((BrokenCheckpoint, *TROUBLE)):
        download(URL, tmp_path / "back")
    assert time.monotonic() - began < BOUND_S
    assert not all_of(tmp_path / "back")
    store.faults.clear()
    assert download(URL, tmp_path / "back").name == second.name


def test_a_fault_that_passes_is_no_failure(
    alone: Groups, write: Write, tmp_path: Path, store: s3_server.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "ATTEMPTS", 4)
    monkeypatch.setattr(mirror, "PATIENCE_S", 30.0)
    store.fail("refuse", "model-00000", times=2)
    folder = write(trained(alone))
    upload(Store(URL), folder)
    assert download(URL, tmp_path / "back").name == folder.name


def test_what_is_longer_than_a_pointer_is_not_read(store: s3_server.Store, tmp_path: Path) -> None:
    endless = tmp_path / "bucket/runs/small/latest"
    endless.parent.mkdir(parents=True)
    endless.write_bytes(b"a" * 10**5)
    with pytest.raises(BrokenCheckpoint):
        download(URL, tmp_path / "back")


@contextmanager
def answering(status: int, headers: Mapping[str, str], body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer to everything; its address, and what it was asked."""
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
    "a page in place of an object": (200, b"<html>log in</html>"),
    "a full bucket": (507, b"<Error><Code>QuotaExceeded</Code><Message>full</Message></Error>"),
    "moved": (301, b"<Error><Code>PermanentRedirect</Code><Endpoint>ELSEWHERE</Endpoint></Error>"),
    "moved for now": (307, b"<Error><Code>TemporaryRedirect</Code><Endpoint>ELSEWHERE</Endpoint></Error>"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_server_that_is_no_store_gets_nothing_mirrored_and_sends_nobody_elsewhere(
    kind: str,
    alone: Groups,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, (status, body) = write(trained(alone)), ANSWERS[kind]
    with answering(200, {}, b"") as (elsewhere, asked_elsewhere):
        body = body.replace(b"ELSEWHERE", elsewhere.removeprefix("http://").encode())
        headers = {"Location": f"{elsewhere}/bucket", "x-amz-bucket-region": "eu-west-1"} if status < 400 else {}
        with answering(status, headers if status > 300 else {}, body) as (address, asked):
            monkeypatch.setenv("S3_ENDPOINT_URL", address)
            copy = Mirror(URL)
            copy.offer(folder)
            copy.finish()
            assert str(folder) in capsys.readouterr().err
            assert copy.in_use() == set()
            with pytest.raises((BrokenCheckpoint, *TROUBLE)):
                download(URL, tmp_path / "back")
        assert asked
        assert not asked_elsewhere
    assert not all_of(tmp_path / "back")
