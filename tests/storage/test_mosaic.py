"""Stores with a client in mosaicml-streaming, here one of the test's, and the side effects of its import."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hybridtron.requirements import is_there
from hybridtron.storage import mosaic
from hybridtron.storage.mosaic import MosaicStore
from hybridtron.storage.remote import remote_of
from hybridtron.storage.retry import ObjectMissingError, RetryPolicy, StorageError, with_retries

ROOT = Path(__file__).parents[2]
with_streaming = pytest.mark.skipif(not is_there("mosaicml-streaming"), reason="mosaicml-streaming is not installed")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """hf://x/NAME is the file NAME of a folder; the clients that were created."""
    created: list[object] = []

    class Client(mosaic.import_alone("streaming.base.storage.download").CloudDownloader):
        def __init__(self) -> None:
            created.append(self)

        @staticmethod
        def _client_identifier() -> str:
            return "hf"

        def clean_up(self) -> None:
            pass

        def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
            shutil.copy(tmp_path / "remote" / remote.removeprefix("hf://x/"), local)

    (tmp_path / "remote/a").mkdir(parents=True)
    (tmp_path / "remote/a/file").write_bytes(b"content")
    monkeypatch.setitem(mosaic.downloaders(), "hf", Client)
    return created


@with_streaming
def test_clients_are_reused_unless_they_failed(tmp_path: Path, clients: list[object]) -> None:
    remote = remote_of("hf://x/", RetryPolicy(retries=0))
    assert isinstance(remote, MosaicStore)
    for number in range(3):
        assert remote.bring("a/file", tmp_path / str(number) / "file").read_bytes() == b"content"
    assert len(clients) == 1
    with pytest.raises(ObjectMissingError):
        with_retries(remote.patience, 0, "fetched", lambda: remote.bring("nothing", tmp_path / "nothing"))
    remote.bring("a/file", tmp_path / "again")
    assert len(clients) == 2  # one that failed is not


@with_streaming
def test_missing_client_is_reported_with_its_package(
    clients: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent() -> object:
        raise ImportError("No module named 'google'")

    monkeypatch.setitem(mosaic.downloaders(), "gs", absent)
    with pytest.raises(ImportError, match="google-cloud-storage"):
        remote_of("gs://bucket/a", RetryPolicy()).bring("file", tmp_path / "file")


@pytest.mark.slow
@with_streaming
def test_import_of_streaming_leaves_no_module_behind() -> None:
    code = (
        "import sys; from hybridtron.storage import mosaic; import hybridtron.data.sources\n"
        "def loaded(): return [name for name in sys.modules if name.partition('.')[0] == 'streaming']\n"
        "assert not loaded()\n"
        "assert 's3' in mosaic.downloaders()\n"
        "assert not loaded()\n"
        "whole = type(sys)('streaming'); sys.modules['streaming'] = whole\n"
        "with mosaic._without_packages(): pass\n"
        "assert loaded() == ['streaming'] and sys.modules['streaming'] is whole\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_missing_streaming_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mosaic.downloaders.cache_clear()
    find_spec = importlib.util.find_spec

    def without_streaming(name: str) -> ModuleSpec | None:
        if name == "streaming":
            return None
        return find_spec(name)

    for module in ("importlib.util", "hybridtron.requirements"):
        monkeypatch.setattr(f"{module}.find_spec", without_streaming)
    with pytest.raises(StorageError, match=r"mosaicml-streaming==0\.13\.0"):
        remote_of("gs://bucket/folder", RetryPolicy())
