"""A store that speaks S3 on the loopback interface, serves a folder, and fails on request.

It has the requests with which boto3 downloads and uploads: GET with and without Range, HEAD, PUT, uploads in parts,
ETag, and errors as XML. The bucket's name is the first part of the path, and is ignored. S3's consistency, rights and
signatures are not modelled.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
from botocore.config import Config

from hybridtron.storage import retry

FOREVER = 10**9


@dataclass
class Fault:
    """A fault in the next `times` downloads of keys that match `pattern`.

    refuse: 503; reset: the connection breaks in mid-body; cut: the body ends early, against its Content-Length; short:
    it does so, and its Content-Length agrees; flip: one bit is another; lost: 404; dribble: a byte every 50 ms; silent:
    no answer. Of uploads: refuse: 503; spoil: one bit of the stored object is another.
    """

    kind: str
    pattern: str
    times: int = FOREVER


@dataclass
class FakeS3:
    """The server's folder and faults, with counts of the requests that it has received."""

    root: Path
    faults: list[Fault] = field(default_factory=list)
    downloads: Counter[str] = field(default_factory=Counter)
    uploads_in_parts: int = 0
    url: str = ""
    delay: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """Restore the initial state."""
        self.faults.clear()
        self.downloads.clear()
        self.delay = 0.0

    def fail(self, kind: str, pattern: str, times: int = FOREVER) -> None:
        self.faults.append(Fault(kind, pattern, times))

    def fault_of(self, key: str, download: bool) -> str:
        """The fault of a request; only a download uses one up."""
        with self._lock:
            self.downloads[key] += download
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, key):
                    fault.times -= download
                    return fault.kind
        return ""


@contextmanager
def serve(root: Path) -> Iterator[FakeS3]:
    """A running store; its address is `url`."""
    store = FakeS3(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfStore", (_Handler,), {"store": store}))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.closing.set()
        server.shutdown()
        server.server_close()


class OneSession:
    """boto3's Session, created once: a new one parses megabytes of JSON, which would take most of a test's time."""

    shared = boto3.session.Session()
    lock = threading.Lock()

    def client(self, name: str, config: Config, endpoint_url: str | None) -> object:
        with self.lock:
            return self.shared.client(name, config=config, endpoint_url=endpoint_url)


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients in this process and its children use a store, with only short pauses before they retry."""
    monkeypatch.setattr(boto3.session, "Session", OneSession)
    monkeypatch.setattr(retry, "PAUSE", 0.05)
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)


def environment(url: str) -> dict[str, str]:
    """Return the environment variables that direct a process to a store."""
    return {
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # the retries that are tested are ours
        "AWS_CONFIG_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


class _Handler(BaseHTTPRequestHandler):
    store: FakeS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait 40 ms

    def do_HEAD(self) -> None:
        self._answer(download=False)

    def do_GET(self) -> None:
        self._answer(download=True)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key, query = self._asked()
        fault = self.store.fault_of(key, download=True)
        if fault == "refuse":
            self._error(503, "SlowDown", download=True)
            return
        if fault == "spoil" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if "partNumber" in query:
            key += f".part-{int(query['partNumber'][0]):05}"
        path = self.store.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        self._reply(b"", hashlib.md5(body).hexdigest())

    def do_POST(self) -> None:
        """The start and the end of an upload in parts."""
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        key, query = self._asked()
        if "uploads" in query:
            self._reply(b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
            return
        path = self.store.root / key
        parts = sorted(path.parent.glob(f"{path.name}.part-*"))
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        self.store.uploads_in_parts += 1
        for part in parts:
            part.unlink()
        self._reply(b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>")

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).lstrip("/").partition("/")[2], parse_qs(parts.query, keep_blank_values=True)

    def _reply(self, body: bytes, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, download: bool) -> None:
        key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        fault = self.store.fault_of(key, download)
        time.sleep(self.store.delay)
        file = self.store.root / key
        if fault == "silent":
            self.store.closing.wait(60)
        elif fault == "refuse" and download:
            self._error(503, "SlowDown", download)
        elif fault == "lost" or not file.is_file():
            self._error(404, "NoSuchKey", download)
        else:
            self._send(file.read_bytes(), fault, download)

    def _send(self, data: bytes, fault: str, download: bool) -> None:
        etag = hashlib.md5(data).hexdigest()
        whole = len(data)
        if fault == "flip":
            data = data[: whole // 2] + bytes([data[whole // 2] ^ 1]) + data[whole // 2 + 1 :]
        elif fault == "short":
            data = data[: whole // 2]
        begin = 0
        end = len(data)
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin = int(match[1])
            end = min(int(match[2] or end - 1) + 1, end)
            status = 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "binary/octet-stream")
        self.end_headers()
        if download:
            self._send_body(data[begin:end], fault)

    def _send_body(self, body: bytes, fault: str) -> None:
        try:
            if fault == "dribble":
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if self.store.closing.wait(0.05):
                        return
            elif fault in ("reset", "cut"):
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                self.close_connection = True
            else:
                self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def _error(self, status: int, code: str, download: bool) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if download:
            self.wfile.write(body)
