"""The files to be prepared: what a name, a pattern or a folder stands for, and the format of each.

A format is recognized by a file's name, and where two share a name by the first bytes. A file that is named must be of
a known format; in a folder others are left out, and reported. Text files count only in a folder that holds nothing
else, since a data set's README.md is not a part of it. Nothing is read here but first bytes and the indexes of MDS
folders.

Links are followed, but no folder and no file is read twice, whatever names lead to it: a link to a folder above it
would multiply the corpus. Only regular files are read, and of an MDS folder only what lies inside it.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hybridtron.data.folder import LARGEST_INDEX
from hybridtron.regular_files import path_inside, read_regular
from hybridtron.storage.digest import digest_of

PACKED_MAGIC = b"LITPKDS"
FORMATS = {
    "jsonl": "*.jsonl, also .jsonl.gz, .jsonl.zst, .json.gz, .json.zst: one JSON object a line",
    "parquet": "*.parquet: a column of text",
    "text": "*.txt, *.md: one document a file",
    "megatron": "*.bin beside its *.idx: Megatron's indexed data set",
    "packed": "*.bin that starts with LITPKDS: packed tokens of lit-gpt and TinyLlama",
    "mds": "a folder with index.json: MDS shards with a column of text or of tokens",
}
_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"), "jsonl"),
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
TEXT_FILES, TEXT_BYTES = 1000, 2**26  # at most so much of a folder of text files makes one input
LONGEST_NAME = 100


class PrepareError(ValueError):
    """Tokens that can't be prepared; the text says why, and what would work."""


class InputError(PrepareError):
    """An input that can't be used."""


class ArgumentError(PrepareError):
    """What was asked for can't be done, whatever is in the inputs."""


@dataclass(frozen=True)
class Input:
    """What one part is made from: a file; a shard of an MDS folder, after its index; or a run of text files."""

    format: str
    files: tuple[Path, ...]
    shard: int = 0

    @property
    def name(self) -> str:
        more = f" and {len(self.files) - 1} more" if self.format == "text" and len(self.files) > 1 else ""
        return f"{self.files[-1] if self.format == 'mds' else self.files[0]}{more}" if self.files else self.format

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return sum(file.stat().st_size for file in self.files)

    def stamps(self) -> list[list[int]]:
        """Size and time of each file: what shows whether one was changed."""
        return [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in self.files)]


@dataclass(frozen=True)
class FoundInputs:
    """The inputs in the order of their parts, and what was skipped in folders.

    That is files of no known format, and second names of files and folders, each with the first one.
    """

    inputs: tuple[Input, ...]
    left_out: tuple[Path, ...]
    repeated: tuple[tuple[Path, Path], ...]


def find(patterns: Sequence[str]) -> FoundInputs:
    """What files, folders and patterns with * stand for; each file counts once, whatever its names are."""
    search = _Search()
    for pattern in patterns:
        for path in search.expanded(pattern):
            if path.is_dir():
                search.add_folder(path)
            else:
                search.add_file(path)
    ordered = sorted(search.inputs, key=lambda one: [str(file) for file in one.files])
    if not ordered:
        raise ArgumentError(f"no input in {' '.join(map(repr, patterns))}. {known_formats()}")
    return FoundInputs(tuple(ordered), tuple(search.left_out), tuple(dict.fromkeys(search.repeated)))


def known_formats() -> str:
    """The formats, as a part of a message."""
    return "Known formats:" + "".join(f"\n  {described}" for described in FORMATS.values())


@lru_cache(maxsize=1000)
def clean_name(name: str) -> str:
    """A source's name as a part of paths: `Github (v2)` -> `Github-v2`. Names that become the same are one source."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-._")
    return cleaned or f"source-{digest_of(name.encode(errors='replace'))[:8]}"


def mds_shards(index: Path) -> list[dict[str, Any]]:
    """The entries of an MDS folder's index.json."""
    try:
        return _parsed_index(index, index.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is not the index of an MDS folder: {error!r}") from error


@lru_cache(maxsize=2)  # every shard's part asks for it
def _parsed_index(index: Path, _: int) -> list[dict[str, Any]]:
    shards = json.loads(read_regular(index, LARGEST_INDEX))["shards"]
    if not all(isinstance(info, dict | None) for shard in shards for info in (shard["raw_data"], shard["zip_data"])):
        raise TypeError("raw_data and zip_data describe files")
    return shards


class _Seen:
    """Files or folders by what they are on disk, whatever names lead there; second names are listed in `repeated`."""

    def __init__(self, repeated: list[tuple[Path, Path]]) -> None:
        self._names: dict[tuple[int, int], Path] = {}
        self._repeated = repeated

    def first(self, path: Path) -> bool:
        """Whether it is found for the first time."""
        status = path.stat()
        known = self._names.get((status.st_dev, status.st_ino))
        self._names.setdefault((status.st_dev, status.st_ino), path)
        if known is not None and known != path:
            self._repeated.append((path, known))
        return known is None


class _Search:
    """The inputs that were found so far."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.left_out: list[Path] = []
        self.repeated: list[tuple[Path, Path]] = []
        self._files = _Seen(self.repeated)

    def expanded(self, pattern: str) -> list[Path]:
        """The files and folders that a name or a pattern stands for."""
        path = Path(pattern).expanduser().absolute()
        if path.exists():
            return [Path(os.path.normpath(path))]
        matched = sorted(set(self._matches(str(path))))
        if not matched:
            missing = "no file matches" if glob.has_magic(pattern) else "there is no"
            raise ArgumentError(f"--input: {missing} {pattern}")
        return [Path(os.path.normpath(match)) for match in matched]

    def _matches(self, pattern: str) -> Iterator[str]:
        """As glob finds them, but `**` enters no folder twice: two links to a folder above make endlessly many ways."""
        before, deep, after = f"{pattern}/*".partition("/**/") if pattern.endswith("/**") else pattern.partition("/**/")
        if not deep:
            yield from glob.glob(pattern)  # noqa: PTH207  it skips hidden files
            return
        while after.startswith("**/"):
            after = after.removeprefix("**/")
        for base in glob.glob(before or "/"):  # noqa: PTH207
            for folder, _, _ in _walked(Path(base), self.repeated):
                yield from self._matches(f"{glob.escape(str(folder))}/{after}")

    def add_file(self, file: Path) -> None:
        if file.name == "index.json":
            self._add_mds(file)
            return
        if file.suffix == ".idx" and file.with_suffix(".bin").exists():
            file = file.with_suffix(".bin")
        known = _format_of(file)
        if known is None:
            raise ArgumentError(f"{file} is of no known format. {known_formats()}")
        if self._files.first(file):
            self.inputs.append(Input(known, (file, file.with_suffix(".idx")) if known == "megatron" else (file,)))

    def add_folder(self, root: Path) -> None:
        texts, others, has_data = [], [], False
        for folder, folders, files in _walked(root, self.repeated):
            if "index.json" in files:
                self._add_mds(folder / "index.json")
                folders.clear()
                has_data = True
                continue
            for file in (folder / name for name in files):
                known = _format_of(file)
                if known == "text":
                    texts.append(file)
                elif known is not None:
                    self.add_file(file)
                    has_data = True
                elif file.suffix != ".idx" or not file.with_suffix(".bin").exists():
                    others.append(file)
        self.left_out += others + (texts if has_data else [])
        if not has_data:
            self.inputs += _of_texts([file for file in texts if self._files.first(file)])

    def _add_mds(self, index: Path) -> None:
        """One input a shard, which stands there as it is or compressed."""
        for place, shard in enumerate(mds_shards(index)):
            names = [info["basename"] for info in (shard["raw_data"], shard["zip_data"]) if info]
            file = next((file for file in (_in_mds(index, name) for name in names) if file.exists()), None)
            if file is None:
                raise InputError(f"{index.parent} has no {' and no '.join(names)}, which its index.json names")
            if self._files.first(file):
                self.inputs.append(Input("mds", (index, file), place))


def _walked(root: Path, repeated: list[tuple[Path, Path]]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """A folder and all below it that is not hidden, each once; links after what is really there.

    Gives each folder's own folders, which the caller may clear, and its files.
    """
    seen = _Seen(repeated)
    seen.first(root)
    for path, names, files in os.walk(root, followlinks=True):
        folder = Path(path)
        visible = [folder / name for name in names if not name.startswith(".")]
        visible.sort(key=lambda one: (one.is_symlink(), one.name))
        names[:] = [one.name for one in visible if seen.first(one)]
        yield folder, names, sorted(name for name in files if not name.startswith("."))


def _in_mds(index: Path, name: object) -> Path:
    file = path_inside(index.parent, name) if isinstance(name, str) else None
    if file is None:
        raise InputError(f"{index} names {name!r}, which leads, or could lead, out of its folder: not read")
    _check_regular(file)
    return file


def _check_regular(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise ArgumentError(f"{file} is not a regular file; a device, a pipe or a folder can't be read as one")


def _format_of(file: Path) -> str | None:
    """The format of a file; an .idx belongs to its .bin."""
    name = file.name.lower()
    known = next((known for suffix, known in _SUFFIXES.items() if name.endswith(suffix)), None)
    if known is None and not name.endswith(".bin"):
        return None
    _check_regular(file)
    if known is not None:
        return known
    with file.open("rb") as opened:
        if opened.read(len(PACKED_MAGIC)) == PACKED_MAGIC:
            return "packed"
    index = file.with_suffix(".idx")
    _check_regular(index)
    return "megatron" if index.exists() else None


def _of_texts(files: Sequence[Path]) -> Iterator[Input]:
    run: list[Path] = []
    size = 0
    for file in files:
        if run and (len(run) == TEXT_FILES or size >= TEXT_BYTES):
            yield Input("text", tuple(run))
            run, size = [], 0
        run.append(file)
        size += file.stat().st_size
    if run:
        yield Input("text", tuple(run))
