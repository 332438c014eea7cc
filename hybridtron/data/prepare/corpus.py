"""The texts of the embedded corpus. Every Python installation holds them, so a first run needs no download.

They are English from the help topics of Python's documentation, and the standard library's sources with their
docstrings: about 10 MB. This is too little for conclusions about language, but it is real: natural text and code,
documents of all lengths, two sources. `embedded.py` prepares a folder from it.

The sources of installed packages enlarge it: with torch, transformers and sympy it has ten times as many tokens.
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

# Tests, packages that are not Python's own, tables of numbers, and the topics, which are documents of their own.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FILES = ("pydoc_data/topics.py", "_sysconfigdata")


def documents() -> list[Document]:
    """Return every document in the corpus, sorted by place. The sources are `text` and `code`."""
    all_documents = itertools.chain(_topics(), _sources(Path(sysconfig.get_path("stdlib")), "lib", "code"))
    return sorted(all_documents, key=lambda document: document.where)


def sizes() -> dict[str, int]:
    """Return each source's bytes, including held-out text."""
    bytes_by_source: dict[str, int] = {}
    for document in documents():
        bytes_by_source[document.source] = bytes_by_source.get(document.source, 0) + _size(document)
    return bytes_by_source


def packaged(folder: Path) -> list[Document]:
    """Return an installed package's files as documents, sorted. Their source is the package's name."""
    return sorted(_sources(folder, folder.name, folder.name), key=lambda document: document.where)


def folder_of(package: str) -> Path:
    """Return an installed package's folder; raise ArgumentError if there is no such package with files."""
    spec = find_spec(package) if package.isidentifier() else None  # finding `a.b` would import a
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError(f"--packages {package}: no package of that name is installed: leave it out, or install it")
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


def _read(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    return _counted(documents(), tally)


def _read_package(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    return _counted(packaged(one.file.parent), tally)


def _counted(found: Iterable[Document], tally: Tally) -> Iterator[Document]:
    for document in found:
        tally.entries += 1
        tally.position += _size(document)
        yield document


def _size(document: Document) -> int:
    assert isinstance(document.content, str)
    return len(document.content.encode())


def embedded_input() -> Input:
    """Return the texts of this Python installation, as an input without files."""
    return Input("embedded", (), texts=sum(sizes().values()))


def package_input(package: str) -> Input:
    """Return an installed package's sources as an input. Its first file stands for the package."""
    folder = folder_of(package)
    return Input("package", (folder / "__init__.py",), texts=sum(map(_size, packaged(folder))))


PACKAGE = Format("package: the Python sources of an installed package, beside the embedded corpus", _read_package)
EMBEDDED = Format("embedded: the texts of this Python installation, with a vocabulary made for them", _read)
