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

from hybridtron.cli import tasks
from hybridtron.cli.main import main
from hybridtron.problems import Code
from hybridtron.storage import published
from hybridtron.tasks.base import TaskError
from hybridtron.tasks.options import named
from hybridtron.tasks.ruler.data_sets import FOLDER, PUBLISHED
from hybridtron.tasks.tokens import ByteTokens
from tests.refusals import raises_code
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
    squad = PUBLISHED["squad"]
    file = replace(squad.file, url=f"{url}/dev-v2.0.json", size=len(SQUAD), sha256=digest)
    monkeypatch.setitem(PUBLISHED, "squad", replace(squad, file=file))
    monkeypatch.setattr(published, "PAUSE", 0.0)


def test_a_downloaded_data_set_is_read_by_its_task(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    publish(monkeypatch, server)
    monkeypatch.chdir(tmp_path)
    with raises_code(TaskError, "no-file", "tasks download squad"):
        named("qa_1").sample(0, 0, ByteTokens(), 690)
    assert main(["tasks", "download", "squad"]) == 0
    assert capsys.readouterr().out == f"{FOLDER / 'dev-v2.0.json'}\n"
    assert (tmp_path / FOLDER / "dev-v2.0.json").read_bytes() == SQUAD
    from_option = named("qa_1", [f"data={GOLDEN / 'squad.json'}"]).sample(0, 0, ByteTokens(), 690)
    assert named("qa_1").sample(0, 0, ByteTokens(), 690) == from_option
    (tmp_path / "served/dev-v2.0.json").unlink()
    assert main(["tasks", "download", "squad"]) == 0  # nothing is asked for again


@pytest.mark.parametrize(
    ("sent", "code", "named"),
    [
        (SQUAD[:-1] + b"x", "changed", "SHA-256"),
        (SQUAD[:-1], "changed", f"not {len(SQUAD)}"),
        (SQUAD + b" " * 2**24, "changed", f"more than {len(SQUAD)} bytes"),
        (None, "unavailable", "404"),
    ],
)
def test_files_with_another_digest_are_not_kept(
    sent: bytes | None, code: Code, named: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, server)
    served = tmp_path / "served/dev-v2.0.json"
    if sent is None:
        served.unlink()
    else:
        served.write_bytes(sent)
    with raises_code(TaskError, code, named):
        tasks.download_main(["squad", "--output", str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []


def test_unreachable_servers_and_existing_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "http://127.0.0.1:9")
    with raises_code(TaskError, "unavailable", "data=FILE"):
        tasks.download_main(["squad", "--output", str(tmp_path)])
    (tmp_path / "dev-v2.0.json").write_text("mine")
    with raises_code(TaskError, "changed", "dev-v2.0.json"):
        tasks.download_main(["squad", "--output", str(tmp_path)])
    assert (tmp_path / "dev-v2.0.json").read_text() == "mine"
