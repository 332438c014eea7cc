"""The embedded corpus: texts that every Python installation contains, so that a first run needs no download.

The source `text` has the help topics from Python's documentation, in English. The source `code` has the Python files in
the standard library. Together they have about 10 MB. This is too little for conclusions about language, but the corpus
has properties of real data: natural text and code, documents of all lengths, and two sources. `embedded.py` prepares a
folder from the texts.

Python files from installed packages can be added, each package as a source with its name.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

from hybridtron.data.prepare.documents import ArgumentError, Document, Format, Input, InputOptions, Tally

# Files that are left out: tests, third-party packages, encoding tables, and the module of the help topics, because
# `_topics` yields each topic as a document.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FILES = ("pydoc_data/topics.py", "_sysconfigdata")


def documents() -> list[Document]:
    """Return every document in the corpus, sorted by its path (`Document.where`). The sources are `text` and `code`."""
    all_documents = itertools.chain(_topics(), _sources(Path(sysconfig.get_path("stdlib")), "lib", "code"))
    return sorted(all_documents, key=lambda document: document.where)


def sizes() -> dict[str, int]:
    """Return each source's size in bytes, including held-out text."""
    bytes_by_source: dict[str, int] = {}
    for document in documents():
        bytes_by_source[document.source] = bytes_by_source.get(document.source, 0) + _size(document)
    return bytes_by_source


def packaged(folder: Path) -> list[Document]:
    """Return an installed package's Python files as documents, sorted by path.

    folder: the package's folder, whose name becomes the source's name
    """
    return sorted(_sources(folder, folder.name, folder.name), key=lambda document: document.where)


def folder_of(package: str) -> Path:
    """Return an installed package's folder; raise ArgumentError if there is no such package with files."""
    spec = find_spec(package) if package.isidentifier() else None  # for `a.b`, find_spec would import `a`
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError(
            f"--packages {package}: no package of that name is installed: leave it out, or install it",
            code="not-installed",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _topics() -> Iterator[Document]:
    return (Document(text, "text", f"topics/{name}") for name, text in topics.items())


def _sources(root: Path, begin: str, source: str) -> Iterator[Document]:
    """Yield the Python files below a folder, except empty files and those not in UTF-8."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            file = Path(folder, name)
            relative = file.relative_to(root).as_posix()
            if file.suffix != ".py" or relative.startswith(_SKIPPED_FILES):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                yield Document(text, source, f"{begin}/{relative}")


def _read(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    return _counted(documents(), tally)


def _read_package(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    return _counted(packaged(entry.file.parent), tally)


def _counted(documents: Iterable[Document], tally: Tally) -> Iterator[Document]:
    for document in documents:
        tally.entries += 1
        tally.position += _size(document)
        yield document


def _size(document: Document) -> int:
    assert isinstance(document.content, str)
    return len(document.content.encode())


def embedded_input() -> Input:
    """Return the texts from this Python installation, as an input without files."""
    return Input("embedded", (), texts=sum(sizes().values()))


def package_input(package: str) -> Input:
    """Return an installed package's Python files as an input. The input's file is the package's `__init__.py`."""
    folder = folder_of(package)
    return Input("package", (folder / "__init__.py",), texts=sum(map(_size, packaged(folder))))


PACKAGE = Format("package: the Python sources of an installed package, beside the embedded corpus", _read_package)
EMBEDDED = Format("embedded: the texts of this Python installation, with a vocabulary made for them", _read)
