"""Stores with a client in mosaicml-streaming, here one of the test's, and the side effects of its import."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.requirements import is_there
from hybridtron.storage import mosaic
from hybridtron.storage.attempts import ObjectMissingError, Patience, StorageError, attempted
from hybridtron.storage.mosaic import MosaicStore
from hybridtron.storage.remote import remote_of

ROOT = Path(__file__).parents[2]
with_streaming = pytest.mark.skipif(not is_there("mosaicml-streaming"), reason="mosaicml-streaming is not installed")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """hf://x/NAME is the file NAME of a folder; the clients that were made."""
    made: list[object] = []

    class Client(mosaic.imported("streaming.base.storage.download").CloudDownloader):
        def __init__(self) -> None:
            made.append(self)

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
    return made


@with_streaming
def test_files_are_brought_by_clients_that_are_used_again(tmp_path: Path, clients: list[object]) -> None:
    remote = remote_of("hf://x/", Patience(retries=0))
    assert isinstance(remote, MosaicStore)
    for number in range(3):
        assert remote.bring("a/file", tmp_path / str(number) / "file").read_bytes() == b"content"
    assert len(clients) == 1
    with pytest.raises(ObjectMissingError):
        attempted(remote.patience, 0, "fetched", lambda: remote.bring("nothing", tmp_path / "nothing"))
    remote.bring("a/file", tmp_path / "again")
    assert len(clients) == 2  # one that failed is not


@with_streaming
def test_a_missing_client_is_named(clients: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent() -> object:
        raise ImportError("No module named 'google'")

    monkeypatch.setitem(mosaic.downloaders(), "gs", absent)
    with pytest.raises(ImportError, match="`pip install google-cloud-storage` brings its client"):
        remote_of("gs://bucket/a", Patience()).bring("file", tmp_path / "file")


@with_streaming
def test_its_import_leaves_nothing_behind() -> None:
    code = (
        "import sys; from hybridtron.storage import mosaic; import hybridtron.data.sources\n"
        "def there(): return [name for name in sys.modules if name.partition('.')[0] == 'streaming']\n"
        "assert not there()\n"
        "assert 's3' in mosaic.downloaders()\n"
        "assert not there()\n"
        "whole = type(sys)('streaming'); sys.modules['streaming'] = whole\n"
        "with mosaic._without_packages(): pass\n"
        "assert there() == ['streaming'] and sys.modules['streaming'] is whole\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_it_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mosaic.downloaders.cache_clear()
    found = importlib.util.find_spec
    for module in ("importlib.util", "hybridtron.requirements"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "streaming" else found(name))
    with pytest.raises(StorageError, match=r"pip install --no-deps .mosaicml-streaming==0\.13\.0"):
        remote_of("gs://bucket/folder", Patience())
