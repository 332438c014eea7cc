"""Finds the input files for `hybridtron data prepare`, by file name, pattern or folder.

- A file that the user names must have a known format.
- In a folder, files with unknown formats are skipped and reported.
- In a folder that also holds data in another format, *.txt and *.md files are skipped and reported, because they may be
  documentation, such as a README.md.
- Text files are grouped into inputs with many files each.
- Symbolic links are followed, but every file is read only once, even if several paths lead to it.
- Only regular files are read. An MDS folder's index.json may name only files inside the folder.

Here only the first bytes of files and the index.json of MDS folders are read.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.data.prepare.documents import ArgumentError, Input, in_runs
from hybridtron.data.prepare.formats import inputs_of, known_formats
from hybridtron.data.prepare.input_tokens import MDS_INDEX

TEXT_FILES = 1000  # maximum number of text files in one input
TEXT_BYTES = 2**26  # an input with text files is complete when they have this number of bytes


@dataclass(frozen=True)
class FoundInputs:
    """The inputs, sorted by path, and the files that were skipped in folders.

    unknown: skipped files with unknown formats
    texts: skipped text files, from folders with data in another format
    repeated: (path, first path) of each file or folder that was found by a second path
    """

    inputs: tuple[Input, ...]
    unknown: tuple[Path, ...]
    texts: tuple[Path, ...]
    repeated: tuple[tuple[Path, Path], ...]


def find(patterns: Sequence[str]) -> FoundInputs:
    """Find the inputs in files, folders and patterns with *; raise ArgumentError if there are none."""
    search = _Search()
    for pattern in patterns:
        for path in search.expanded(pattern):
            if path.is_dir():
                search.add_folder(path)
            else:
                search.add_file(path)
    runs = in_runs(sorted(search.texts, key=str), lambda file: file.stat().st_size, TEXT_BYTES, TEXT_FILES)
    inputs = [*search.inputs, *(Input("text", tuple(run)) for run in runs)]
    if not inputs:
        raise ArgumentError(f"no input in {' '.join(map(repr, patterns))}. {known_formats()}", code="missing")
    return FoundInputs(
        inputs=tuple(sorted(inputs, key=lambda data_input: [str(file) for file in data_input.files])),
        unknown=tuple(dict.fromkeys(search.unknown)),
        texts=tuple(sorted(search.beside.difference(search.texts))),
        repeated=tuple(dict.fromkeys(search.repeated)),
    )


class _Seen:
    """Files or folders found so far, by device and inode.

    repeated: list to which `first` appends (path, first path) when a second path leads to a known file or folder
    """

    def __init__(self, repeated: list[tuple[Path, Path]]) -> None:
        self._names: dict[tuple[int, int], Path] = {}
        self._repeated = repeated

    def first(self, path: Path) -> bool:
        """Add a path; return True if its file or folder is new."""
        status = path.stat()
        known = self._names.get((status.st_dev, status.st_ino))
        self._names.setdefault((status.st_dev, status.st_ino), path)
        if known is not None and known != path:
            self._repeated.append((path, known))
        return known is None


class _Search:
    """The inputs found so far."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.texts: list[Path] = []
        self.beside: set[Path] = set()  # text files in folders with other data
        self.unknown: list[Path] = []
        self.repeated: list[tuple[Path, Path]] = []
        self._files = _Seen(self.repeated)

    def expanded(self, pattern: str) -> list[Path]:
        """Return the files and folders that a path or a pattern stands for; raise ArgumentError if there are none."""
        path = Path(pattern).expanduser().absolute()
        if path.exists():
            return [Path(os.path.normpath(path))]
        matched = sorted(set(self._matches(str(path))))
        if not matched:
            if glob.has_magic(pattern):
                missing = "no file matches"
            else:
                missing = "there is no"
            raise ArgumentError(f"--input: {missing} {pattern}", code="no-file")
        return [Path(os.path.normpath(match)) for match in matched]

    def _matches(self, pattern: str) -> Iterator[str]:
        """Yield the paths that match a pattern, as `glob.glob` does, but enter no folder twice for `**`.

        With `glob.glob`, a link to a parent folder would give endlessly many paths.
        """
        if pattern.endswith("/**"):
            before, deep, after = f"{pattern}/*".partition("/**/")
        else:
            before, deep, after = pattern.partition("/**/")
        if not deep:
            yield from glob.glob(pattern)  # noqa: PTH207  glob.glob skips hidden files
            return
        while after.startswith("**/"):
            after = after.removeprefix("**/")
        for base in glob.glob(before or "/"):  # noqa: PTH207
            for folder, _, _ in _walk(Path(base), self.repeated):
                yield from self._matches(f"{glob.escape(str(folder))}/{after}")

    def add_file(self, file: Path) -> None:
        """Add the inputs of a file that the user named; raise ArgumentError if its format is not known."""
        if file.suffix == ".idx" and file.with_suffix(".bin").exists():
            file = file.with_suffix(".bin")
        inputs = inputs_of(file)
        if not inputs:
            raise ArgumentError(f"{file} has an unknown format. {known_formats()}", code="unsupported")
        self._add(inputs)

    def add_folder(self, root: Path) -> None:
        """Add the inputs in a folder. Text files are added only if the folder has no data in another format."""
        texts: list[Input] = []
        has_data = False
        for folder, folders, files in _walk(root, self.repeated):
            if MDS_INDEX in files:
                files = [MDS_INDEX]  # other files belong to the MDS data set
                folders.clear()
            for file in (folder / name for name in files):
                inputs = inputs_of(file)
                if inputs and inputs[0].format == "text":
                    texts += inputs
                elif inputs:
                    self._add(inputs)
                    has_data = True
                elif file.suffix != ".idx" or not file.with_suffix(".bin").exists():
                    self.unknown.append(file)
        if has_data:
            self.beside.update(text.file for text in texts)
        else:
            self._add(texts)

    def _add(self, inputs: Sequence[Input]) -> None:
        for data_input in inputs:
            if not self._files.first(data_input.file):
                continue
            if data_input.format == "text":
                self.texts.append(data_input.file)
            else:
                self.inputs.append(data_input)


def _walk(root: Path, repeated: list[tuple[Path, Path]]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder and all visible folders below it, each only once, and real folders before links.

    Yields (folder, names of its subfolders, names of its files). If the caller clears the list of subfolders, they are
    not walked.
    """
    seen = _Seen(repeated)
    seen.first(root)
    for path, names, files in os.walk(root, followlinks=True):
        folder = Path(path)
        subfolders = [folder / name for name in names if not name.startswith(".")]
        subfolders.sort(key=lambda subfolder: (subfolder.is_symlink(), subfolder.name))
        names[:] = [subfolder.name for subfolder in subfolders if seen.first(subfolder)]
        yield folder, names, sorted(name for name in files if not name.startswith("."))
