"""Write passages of pages that list what the code holds: files of each room, order of imports, kinds, schedules.

A file is described by the first sentence of its docstring. A passage is the text between `<!-- NAME -->` and
`<!-- /NAME -->` on a page of `PAGES`. `make reference` runs this; a test compares the result with the repository.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from hybridtron.architecture import SPECS
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.interop import consumers
from tests.test_architecture import ORDER

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridtron"
PAGES = ("hybridtron/README.md", "configs/README.md", "docs/glossary.md", "docs/export.md")


def import_order() -> str:
    """Write the rooms of the package from left to right, those below the device on one floor."""
    floor = ORDER.index("device")
    rooms = [", ".join(ORDER[:floor]), *(room for room in ORDER[floor:] if room != "__main__")]
    return f"\n`{' -> '.join(rooms)}`\n"


def listed(names: Iterable[str]) -> str:
    """Write names as a list in running text."""
    return ", ".join(f"`{name}`" for name in names)


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring, as a cell of a table."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:").replace("|", r"\|")


def modules(folder: Path) -> Iterator[tuple[Path, Path]]:
    """List the files of a folder, each with the file that describes it; a package below stands for its own files."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            yield path, path / "__init__.py"
        elif path.is_dir():
            yield from modules(path)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield path, path


def table_of(folder: Path, listed_files: Iterable[tuple[Path, Path]]) -> str:
    """Write a table of files with their first sentences, each linked from the map."""
    rows = ["\n\n| file | |", "|---|---|"]
    for path, described_by in listed_files:
        name = path.relative_to(folder).as_posix() + ("/" if path.is_dir() else "")
        rows.append(f"| [`{name}`]({path.relative_to(PACKAGE).as_posix()}) | {first_sentence(described_by)} |")
    return "\n".join(rows) + "\n\n"


def files_of(room: str) -> str:
    """Write the table of a room's files."""
    return table_of(PACKAGE / room, modules(PACKAGE / room))


def single_files() -> str:
    """Write the table of the rooms that are one file, in the order of imports."""
    files = [PACKAGE / f"{room}.py" for room in ORDER if (PACKAGE / f"{room}.py").is_file()]
    return table_of(PACKAGE, [(file, file) for file in files])


ROOMS = [room for room in ORDER if (PACKAGE / room).is_dir()]
PASSAGES: dict[str, Callable[[], str]] = {
    "order": import_order,
    "kinds": lambda: listed(SPECS),
    "schedules": lambda: listed(SHAPES),
    "consumers": consumers.table,
    "files": single_files,
    **{f"files of {room}": partial(files_of, room) for room in ROOMS},
}


def filled(text: str) -> str:
    """Return a page's text with every passage as the code has it."""
    marked = re.compile(rf"<!-- ({'|'.join(PASSAGES)}) -->.*?<!-- /\1 -->", re.DOTALL)
    return marked.sub(lambda match: f"<!-- {match[1]} -->{PASSAGES[match[1]]()}<!-- /{match[1]} -->", text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
        sys.stdout.write(f"{path}\n")
