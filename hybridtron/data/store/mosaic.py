"""mosaicml-streaming without what it does not need: the one place that imports it.

`import streaming` also imports its vision part, and with it torchvision, which is not installed and whose CPU wheels
break transformers; `import streaming.base` imports its own loader, and with it transformers. What is used here, its
shard format, its storage clients and its hashes, needs neither. Two empty modules stand in for the packages'
`__init__`, and the modules below them are found as usual.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType


def _stand_in_for(package: str, folder: Path) -> None:
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module


_found = importlib.util.find_spec("streaming")
if _found is None or not _found.submodule_search_locations:
    raise ImportError("mosaicml-streaming is not installed; `make setup` installs it, without the dependencies it pins")
_root = Path(next(iter(_found.submodule_search_locations)))
_stand_in_for("streaming", _root)
_stand_in_for("streaming.base", _root / "base")

from streaming.base.compression import decompress, get_compression_extension  # noqa: E402
from streaming.base.format.base.reader import FileInfo  # noqa: E402
from streaming.base.format.mds.reader import MDSReader  # noqa: E402
from streaming.base.format.mds.writer import MDSWriter  # noqa: E402
from streaming.base.hashing import get_hash  # noqa: E402
from streaming.base.storage.download import DOWNLOADER_MAPPINGS as DOWNLOADERS  # noqa: E402
from streaming.base.stream import Stream  # noqa: E402

VERSION = version("mosaicml-streaming")

__all__ = [
    "DOWNLOADERS",
    "VERSION",
    "FileInfo",
    "MDSReader",
    "MDSWriter",
    "Stream",
    "decompress",
    "get_compression_extension",
    "get_hash",
]
