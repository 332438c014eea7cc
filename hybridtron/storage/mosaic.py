"""Downloads from stores that are read through mosaicml-streaming: gs://, hf://, azure:// and the others in CLIENTS.

mosaicml-streaming (import name `streaming`) is an optional package, and only this file imports it. The package requires
transformers < 5, numpy < 2.2 and torchvision. The modules that are used here need none of these three, so the package
is installed without its dependencies.
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
from hybridtron.storage.retry import RetryPolicy, StorageError

PACKAGE = "streaming"
# URL scheme -> arguments for `pip install` that install the store's client
CLIENTS = {
    "gs": "google-cloud-storage",
    "oci": "oci",
    "azure": "azure-storage-blob azure-identity",
    "azure-dl": "azure-storage-file-datalake azure-identity",
    "hf": "huggingface-hub",
    "sftp": "paramiko",
    "dbfs": "databricks-sdk",
    "alipan": "AliPCS-Py",
}


class MosaicStore:
    """A folder in a store, by its URL; the URL's scheme is a key of CLIENTS.

    A client serves one download at a time. Idle clients stay connected, and serve later downloads.
    """

    def __init__(self, url: str, patience: RetryPolicy) -> None:
        self.url, self.patience, self.scheme = url.rstrip("/"), patience, urlparse(url).scheme
        try:
            downloaders()
        except ImportError as error:
            raise StorageError(f"can't be read, since a package is missing: {missing('streaming') or error}") from error
        self._idle: list[Any] = []
        self._owner = os.getpid()

    def bring(self, name: str, into: Path) -> Path:
        """Download an object to the local file `into`, and return `into`.

        This is one attempt. Each wait for the network is limited, but the attempt's duration is not limited. A client
        is not used again after a failed download.
        """
        if self._owner != os.getpid():  # a forked process must not use its parent's connections
            self._idle, self._owner = [], os.getpid()
        try:
            if self._idle:
                client = self._idle.pop()
            else:
                client = downloaders()[self.scheme]()
        except ImportError as error:
            raise ImportError(f"{error}; install the client: pip install {CLIENTS.get(self.scheme, '')}") from error
        client.download(f"{self.url}/{name}", str(into), self.patience.timeout)
        self._idle.append(client)
        return into


@cache
def downloaders() -> dict[str, Any]:
    """Return URL scheme, such as `gs` -> downloader class of mosaicml-streaming.

    Raises ImportError if mosaicml-streaming, or a package that its download module imports, is not installed.
    """
    return import_alone(f"{PACKAGE}.base.storage.download").DOWNLOADER_MAPPINGS


def import_alone(name: str) -> ModuleType:
    """Import a module of mosaicml-streaming without running the __init__.py of its parent packages."""
    with _without_packages():
        import_module(f"{PACKAGE}.base.format")  # must be first: `base.format` and `base.util` import each other
        return import_module(name)


@contextmanager
def _without_packages() -> Iterator[None]:
    """Allow imports of modules in `streaming` and `streaming.base` without running these two packages' __init__.py.

    The first __init__.py imports torchvision, and the second imports transformers < 5. Neither is needed here, and
    neither can be installed together with hybridtron's requirements. So two empty modules replace `streaming` and
    `streaming.base` inside the block. At the end of the block, all modules of mosaicml-streaming are removed from
    sys.modules, because other code may import the full package later, and must not find the empty modules. If the full
    package was imported before the block, the block uses it and nothing is replaced.
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
