"""The files to be prepared: what a name, a pattern or a folder stands for, and the format of each.

A format is told by a file's name, and where two share a name by the first bytes. A file that is named must be of a
known one; in a folder others are left out, and told. Text files count only in a folder that holds nothing else, since
a data set's README.md is not a part of it. Nothing is read here but first bytes and the indexes of MDS folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from hybridtron.data.folder import digest_of

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
        """Size and time of each file: what tells whether one was changed."""
        return [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in self.files)]


@dataclass(frozen=True)
class Found:
    """The inputs in the order of their parts, and the files of folders that are of no known format."""

    inputs: tuple[Input, ...]
    left_out: tuple[Path, ...]


def find(patterns: Sequence[str]) -> Found:
    """What files, folders and patterns with * stand for; each file counts once."""
    found: dict[tuple[Path, ...], Input] = {}
    left_out: list[Path] = []
    for pattern in patterns:
        for path in _expanded(pattern):
            inputs = _of_folder(path, left_out) if path.is_dir() else _of_file(path)
            found.update({one.files: one for one in inputs})
    ordered = sorted(found.values(), key=lambda one: [str(file) for file in one.files])
    if not ordered:
        raise ArgumentError(f"no input in {' '.join(map(repr, patterns))}. {known_formats()}")
    return Found(tuple(ordered), tuple(left_out))


def known_formats() -> str:
    """The formats, as a part of a message."""
    return "Known formats:" + "".join(f"\n  {described}" for described in FORMATS.values())


@lru_cache(maxsize=1000)
def clean_name(name: str) -> str:
    """A source's name as a part of paths: `Github (v2)` -> `Github-v2`. Names that become the same are one source."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip("-._")
    return cleaned or f"source-{digest_of(name.encode(errors='replace'))[:8]}"


def _expanded(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser().absolute()
    if path.exists():
        return [Path(os.path.normpath(path))]
    matched = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  it passes over hidden files
    if not matched:
        missing = "no file matches" if glob.has_magic(pattern) else "there is no"
        raise ArgumentError(f"--input: {missing} {pattern}")
    return [Path(os.path.normpath(match)) for match in matched]


def _format_of(file: Path) -> str | None:
    """The format of a file; an .idx belongs to its .bin."""
    name = file.name.lower()
    for suffix, known in _SUFFIXES.items():
        if name.endswith(suffix):
            return known
    if not name.endswith(".bin"):
        return None
    with file.open("rb") as opened:
        if opened.read(len(PACKED_MAGIC)) == PACKED_MAGIC:
            return "packed"
    return "megatron" if file.with_suffix(".idx").exists() else None


def _of_file(file: Path) -> Iterable[Input]:
    if file.name == "index.json":
        return _of_mds(file)
    if file.suffix == ".idx" and file.with_suffix(".bin").exists():
        file = file.with_suffix(".bin")
    known = _format_of(file)
    if known is None:
        raise ArgumentError(f"{file} is of no known format. {known_formats()}")
    return [Input(known, (file, file.with_suffix(".idx")) if known == "megatron" else (file,))]


def _of_folder(root: Path, left_out: list[Path]) -> list[Input]:
    inputs, texts, others = [], [], []
    for path, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        folder = Path(path)
        if "index.json" in files:
            inputs += _of_mds(folder / "index.json")
            folders.clear()
            continue
        for file in (folder / name for name in sorted(files) if not name.startswith(".")):
            known = _format_of(file)
            if known == "text":
                texts.append(file)
            elif known is not None:
                inputs += _of_file(file)
            elif file.suffix != ".idx" or not file.with_suffix(".bin").exists():
                others.append(file)
    left_out += others + (texts if inputs else [])
    return inputs or list(_of_texts(texts))


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


def _of_mds(index: Path) -> list[Input]:
    """One input a shard, which stands there as it is or compressed."""
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
        named = [[shard[form]["basename"] for form in ("raw_data", "zip_data") if shard[form]] for shard in shards]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} is not the index of an MDS folder: {error!r}") from error
    inputs = []
    for place, names in enumerate(named):
        file = next((index.parent / name for name in names if (index.parent / name).exists()), None)
        if file is None:
            raise InputError(f"{index.parent} has no {' and no '.join(names)}, which its index.json names")
        inputs.append(Input("mds", (index, file), place))
    return inputs
