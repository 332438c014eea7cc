"""Stores that only mosaicml-streaming has a client for (gs://, hf://, azure:// ...): the one place that imports it.

It is optional, and is installed without its dependencies: it pins transformers < 5, numpy < 2.2 and torchvision, which
what is used of it does not need.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from hybridtron.requirements import missing
from hybridtron.storage.attempts import Patience, StorageError

PACKAGE = "streaming"
CLIENTS = {
    "gs": "google-cloud-storage",
    "oci": "oci",
    "azure": "azure-storage-blob azure-identity",
    "azure-dl": "azure-storage-file-datalake azure-identity",
    "hf": "huggingface-hub",
    "sftp": "paramiko",
    "dbfs": "databricks-sdk",
    "alipan": "AliPCS-Py",
}  # scheme -> what pip installs for it


class MosaicStore:
    """A folder behind one of these URLs. Its clients are connected once, and each serves one attempt at a time."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience, self.scheme = url.rstrip("/"), patience, urlparse(url).scheme
        try:
            downloaders()
        except ImportError as error:
            raise StorageError(f"needs what is absent: {missing('streaming') or error}") from error
        self._idle: list[Any] = []
        self._owner = os.getpid()

    def bring(self, name: str, into: Path) -> Path:
        """Write an object into a file of this machine: one attempt, neither bounded nor repeated.

        A client that failed, or that nobody waits for any more, is not used again.
        """
        if self._owner != os.getpid():  # a forked process has its parent's connections
            self._idle, self._owner = [], os.getpid()
        try:
            client = self._idle.pop() if self._idle else downloaders()[self.scheme]()
        except ImportError as error:
            raise ImportError(f"{error}; `pip install {CLIENTS.get(self.scheme, '')}` brings its client") from error
        client.download(f"{self.url}/{name}", str(into), self.patience.timeout)
        self._idle.append(client)
        return into


@cache
def downloaders() -> dict[str, Any]:
    """Scheme -> mosaicml-streaming's class; ImportError where it, or what it needs for this, is not installed."""
    return imported(f"{PACKAGE}.base.storage.download").DOWNLOADER_MAPPINGS


def imported(name: str) -> ModuleType:
    """A module of mosaicml-streaming, imported without the packages above it."""
    with _without_packages():
        import_module(f"{PACKAGE}.base.format")  # first, as it and `base.util` import each other
        return import_module(name)


@contextmanager
def _without_packages() -> Iterator[None]:
    """Let modules below `streaming` and `streaming.base` be imported without these two.

    `import streaming` imports its vision part, and with it torchvision; `import streaming.base` its loader, and with it
    transformers < 5. Neither is needed here or can be had beside what is. Two empty modules stand in for them while the
    import lasts; then every module of it is taken out of sys.modules again, since somebody else may want to import the
    whole package later, and must not find halves of it. Where it is there already, whole, it is used as it is.
    """
    if PACKAGE in sys.modules:
        yield
        return
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    root, before = Path(next(iter(found.submodule_search_locations))), set(sys.modules)
    for package, folder in ((PACKAGE, root), (f"{PACKAGE}.base", root / "base")):
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(folder)]
        sys.modules[package] = stand_in
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == PACKAGE:
                del sys.modules[name]
