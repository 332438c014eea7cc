"""Stores for which only mosaicml-streaming has a client (gs://, hf://, azure:// ...). Only this file imports it.

The package is optional, and is installed without its dependencies. It pins transformers < 5, numpy < 2.2 and
torchvision, but the modules that are used here need none of them.
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
}  # scheme -> packages that pip installs for it


class MosaicStore:
    """A folder in one of these stores, by its URL. Clients stay connected, and each serves one attempt at a time."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience, self.scheme = url.rstrip("/"), patience, urlparse(url).scheme
        try:
            downloaders()
        except ImportError as error:
            raise StorageError(f"needs what is absent: {missing('streaming') or error}") from error
        self._idle: list[Any] = []
        self._owner = os.getpid()

    def bring(self, name: str, into: Path) -> Path:
        """Download an object to a local file: one attempt, without time limit or retry.

        A client returns to the idle ones only after its download has succeeded.
        """
        if self._owner != os.getpid():  # a forked process must not use its parent's connections
            self._idle, self._owner = [], os.getpid()
        try:
            if self._idle:
                client = self._idle.pop()
            else:
                client = downloaders()[self.scheme]()
        except ImportError as error:
            raise ImportError(f"{error}; `pip install {CLIENTS.get(self.scheme, '')}` brings its client") from error
        client.download(f"{self.url}/{name}", str(into), self.patience.timeout)
        self._idle.append(client)
        return into


@cache
def downloaders() -> dict[str, Any]:
    """Return mosaicml-streaming's downloader class for each scheme.

    Raises ImportError if the package, or a dependency of these classes, is not installed.
    """
    return imported(f"{PACKAGE}.base.storage.download").DOWNLOADER_MAPPINGS


def imported(name: str) -> ModuleType:
    """Import a module of mosaicml-streaming without importing its parent packages."""
    with _without_packages():
        import_module(f"{PACKAGE}.base.format")  # first, because it and `base.util` import each other
        return import_module(name)


@contextmanager
def _without_packages() -> Iterator[None]:
    """Allow imports below `streaming` and `streaming.base` without importing these two packages.

    `import streaming` imports its vision part and so torchvision; `import streaming.base` imports its loader and so
    transformers < 5. Neither is needed here, nor can it be installed beside this package's requirements. Two empty
    modules replace the packages during the import. Afterwards every module of the package is removed from sys.modules,
    because other code may import the full package later and must not find half of it. A package that is already
    imported is used as it is.
    """
    if PACKAGE in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    root = Path(next(iter(spec.submodule_search_locations)))
    modules_before = set(sys.modules)
    for package, folder in ((PACKAGE, root), (f"{PACKAGE}.base", root / "base")):
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(folder)]
        sys.modules[package] = stand_in
    try:
        yield
    finally:
        for name in sys.modules.keys() - modules_before:
            if name.partition(".")[0] == PACKAGE:
                del sys.modules[name]
