"""Data sets of tasks are taken from a server only with the bytes that were published, and found by the tasks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.tasks import download as downloads
from hybridtron.tasks.base import TaskError
from hybridtron.tasks.download import FOLDER, PUBLISHED
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.tasks.rules import GOLDEN

SQUAD = (GOLDEN / "squad.json").read_bytes()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up."""

    def handle_error(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves a small file under the name of SQuAD's."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served/dev-v2.0.json").write_bytes(SQUAD)
    with Server(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def publish(monkeypatch: pytest.MonkeyPatch, url: str, digest: str = hashlib.sha256(SQUAD).hexdigest()) -> None:
    known = replace(PUBLISHED["squad"], url=f"{url}/dev-v2.0.json", size=len(SQUAD), sha256=digest)
    monkeypatch.setitem(downloads.PUBLISHED, "squad", known)


def test_a_task_finds_what_was_fetched(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    publish(monkeypatch, server)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match="tasks download squad"):
        named("qa_1").sample(0, 0, ByteTokens(), 690)
    assert main(["tasks", "download", "squad"]) == 0
    assert capsys.readouterr().out == f"{FOLDER / 'dev-v2.0.json'}\n"
    assert (tmp_path / FOLDER / "dev-v2.0.json").read_bytes() == SQUAD
    given = named("qa_1", [f"data={GOLDEN / 'squad.json'}"]).sample(0, 0, ByteTokens(), 690)
    assert named("qa_1").sample(0, 0, ByteTokens(), 690) == given
    (tmp_path / "served/dev-v2.0.json").unlink()
    assert main(["tasks", "download", "squad"]) == 0  # nothing is asked for again


@pytest.mark.parametrize(
    ("sent", "said"),
    [(SQUAD[:-1], "SHA-256"), (SQUAD + b" " * 2**22, "SHA-256"), (None, "404")],
)
def test_other_bytes_are_not_kept(
    sent: bytes | None, said: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    publish(monkeypatch, server)
    served = tmp_path / "served/dev-v2.0.json"
    served.unlink() if sent is None else served.write_bytes(sent)
    assert main(["tasks", "download", "squad", "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_no_server_and_another_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    publish(monkeypatch, "http://127.0.0.1:9")
    assert main(["tasks", "download", "squad", "--output", str(tmp_path)]) == 2
    assert "data=FILE" in capsys.readouterr().err
    (tmp_path / "dev-v2.0.json").write_text("mine")
    assert main(["tasks", "download", "squad", "--output", str(tmp_path)]) == 2
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "dev-v2.0.json").read_text() == "mine"
