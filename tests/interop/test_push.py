"""Uploads of an export, to a server on this machine that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridtron.cli.main import main
from hybridtron.config.export_class import RECORD
from hybridtron.interop.push import CARD, CannotPush, push, require_name, uploads
from tests.interop.conftest import Stored

REPOSITORY = "mary/samba"


class Hub(ThreadingHTTPServer):
    """A stub of the Hub: it takes every file within the commit, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.headers.get("Authorization") == "Bearer hf_reader":
            return self.answer({"error": "may not write"}, 403)
        if self.path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            return self.answer({"url": f"{self.server.address}/{REPOSITORY}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path.startswith(f"/api/models/{REPOSITORY}/preupload/"):
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self.answer({"files": modes})
        if self.path.startswith(f"/api/models/{REPOSITORY}/commit/"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.answer({"commitUrl": f"{self.server.address}/{REPOSITORY}/commit/1a2b", "commitOid": "1a2b"})
        return self.answer({"error": self.path}, 404)

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def exported(stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("push") / "out"
    assert main(["export", str(stored("samba").folder), "--output", str(output), "--verify", "none"]) == 0
    return output


def test_everything_arrives_with_license_and_origin(exported: Path, hub: Hub) -> None:
    address = push(uploads(exported, "apache-2.0"), REPOSITORY, True, hub.address)
    assert address.endswith("/commit/1a2b")
    assert hub.tokens == {"Bearer hf_writer"}
    assert hub.repositories[0]["name"] == "samba"
    assert hub.files.keys() == {path.name for path in exported.iterdir()}
    same = {path.name for path in exported.iterdir() if hub.files[path.name] == path.read_bytes()}
    assert hub.files.keys() - same == {CARD, RECORD}
    card = hub.files[CARD].decode()
    record = json.loads((exported / RECORD).read_text())
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    assert "\n- license: apache-2.0\n" in card
    assert f"commit {record['commit']}" in card
    assert "`samba/checkpoints/step-00000001`, step 1" in card
    assert json.loads(hub.files[RECORD])["checkpoint"] == "samba/checkpoints/step-00000001"
    assert not any(str(exported.parent.parent).encode() in content for content in hub.files.values())


def test_a_measured_loss_is_in_the_card(exported: Path, tmp_path: Path) -> None:
    record = json.loads((exported / RECORD).read_text()) | {"held_out_loss": 2.34567}
    (tmp_path / RECORD).write_text(json.dumps(record))
    (tmp_path / CARD).write_text((exported / CARD).read_text())
    card = next(file.source for file in uploads(tmp_path, None) if file.name == CARD)
    assert b"held-out loss 2.3457" in card
    assert b"- license: none is stated" in card


def test_nothing_is_sent_without_the_option(exported: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(exported), REPOSITORY]) == 0
    printed = capsys.readouterr()
    assert "nothing was uploaded" in printed.out
    assert "model.safetensors" in printed.out
    assert "no license is stated" in printed.err
    assert not hub.tokens


def test_a_token_that_may_not_write_is_refused(exported: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(CannotPush, match="hf auth login") as refused:
        push(uploads(exported, None), REPOSITORY, False, hub.address)
    assert refused.value.code == "unavailable"
    assert not hub.files


def test_a_hub_that_does_not_answer_is_named(exported: Path, hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(CannotPush, match=r"was not uploaded: .*; check the name and the network") as refused:
        push(uploads(exported, None), REPOSITORY, False, hub.address)
    assert refused.value.code == "unavailable"


@pytest.mark.parametrize("name", ["samba", "a/b/c", "mary/", "../samba", "mary/sam ba", "mary/a--b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CannotPush) as refused:
        require_name(name)
    assert refused.value.code == "malformed"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotPush) as refused:
        uploads(tmp_path, None)
    assert refused.value.code == "no-file"
    for text in ("[]", "{", "{}"):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(CannotPush) as refused:
            uploads(tmp_path, None)
        assert refused.value.code == "unreadable"
