"""A local server that publishes files and data sets as the Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import pytest

from hybridtron.storage import published

COMMIT = "0123abcd"


class Publisher(ThreadingHTTPServer):
    """Serves files by path. `asked` has each request's headers.

    cut: the next answers end after these numbers of bytes
    says_length: answers give their length
    shift: how far answers with a part of a file say that the part lies from where it was asked for
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.moves: dict[str, str] = {}
        self.cut: list[int] = []
        self.says_length = True
        self.shift = 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        pass

    def publish(self, name: str, files: dict[str, bytes], hashed: str = "", kind: str = "datasets") -> None:
        """Publish a repository on the Hub; the index has the SHA-256 of the file `hashed`."""
        siblings = []
        for path, stored in files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(stored)}
            if path == hashed:
                entry["lfs"] = {"sha256": hashlib.sha256(stored).hexdigest(), "size": len(stored)}
            siblings.append(entry)
            prefix = "" if kind == "models" else f"/{kind}"
            self.files[f"{prefix}/{name}/resolve/{COMMIT}/{path}"] = stored
        index = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
        for revision in ("main", COMMIT):
            self.files[f"/api/{kind}/{name}/revision/{revision}"] = index


class Answer(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        self.server.asked.append((path, dict(self.headers)))
        if path in self.server.moves:
            self.send_response(302)
            self.send_header("Location", self.server.moves[path])
            self.end_headers()
            return
        stored = self.server.files.get(path)
        if stored is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.md5(stored).hexdigest()}"'
        start = 0
        if "Range" in self.headers and self.headers.get("If-Range") == tag:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        if start == len(stored):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{start}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + self.server.shift}-{len(stored) - 1}/{len(stored)}")
        self.send_header("ETag", tag)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(stored) - start))
        self.end_headers()
        stop = start + self.server.cut.pop(0) if self.server.cut else len(stored)
        self.wfile.write(stored[start:stop])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def publishing() -> Iterator[Publisher]:
    """Serve files while the block runs."""
    with Publisher() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@contextmanager
def publishing_as_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """Serve files as the Hub, where downloads without a token look for them, and try again at once."""
    monkeypatch.setattr(published, "PAUSE", 0.0)
    with publishing() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running
