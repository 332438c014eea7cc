"""One part of a folder of prepared tokens: documents of some inputs, tokenized and written, and a record of them.

Inputs that are smaller than a shard share a part, so that a folder has the shards that its bytes need and not one for
each file. A part depends on its inputs, the vocabulary and the settings alone, not on the others, nor on the process
that writes it. Its record is written last, and whole or not at all: what has no record counts as not begun.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridtron.data.prepare.documents import Document, Input, InputOptions, Tally, in_runs, in_validation
from hybridtron.data.prepare.formats import FORMATS, read
from hybridtron.data.prepare.learned import NOTHING
from hybridtron.data.prepare.tokenized import ended, tokenized
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import SHARD_SIZE, PartRecord, PartWriter, Records
from hybridtron.storage.durable import put, sync

BATCH = 2**20  # characters tokenized at once; it takes about a hundred bytes for each
MOST = 2**12  # documents tokenized at once
TOKENS = "tokens"  # the folder within the work folder that becomes the output


@dataclass(frozen=True)
class FolderSettings:
    """What beside inputs and vocabulary decides how a folder looks; the names are those of the options.

    Tokens of a document that are limited are counted with its eos.
    """

    validation: float = 0.005
    shard_size: int = SHARD_SIZE
    compression: str | None = None
    text_key: str = "text"
    source: str = "text"
    learn: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class PrepareJob:
    """Everything that it takes to write any part of a folder."""

    work: Path
    inputs: tuple[Input, ...]
    vocabulary: Vocabulary
    settings: FolderSettings
    max_bad: float

    @cached_property
    def parts(self) -> tuple[tuple[Input, ...], ...]:
        """The inputs of each part, in their order: as many together as reach the size of a shard."""
        runs = in_runs(self.inputs, lambda one: one.size, self.settings.shard_size, len(self.inputs))
        return tuple(tuple(run) for run in runs)


class Finished(NamedTuple):
    """The content of a record: the state of the inputs' files, a tally of each input, and the shards."""

    stamps: list[list[int]]
    tallies: list[Tally]
    records: Records


def part_name(number: int) -> str:
    return f"part-{number:05}"


def write_part(job: PrepareJob, number: int) -> Iterator[tuple[int, int]]:
    """Write a part and its record; gives the bytes of inputs that were read, and the tokens, since the last time."""
    settings = job.settings
    inputs = job.parts[number]
    part = PartWriter(
        job.work / TOKENS,
        part_name(number),
        job.vocabulary.size,
        settings.shard_size,
        settings.compression,
        masked=settings.learn is not None,
    )
    stamps = stamps_of(inputs)
    tallies = [Tally(one.name, FORMATS[one.format].noun, job.max_bad) for one in inputs]
    for one, tally in zip(inputs, tallies, strict=True):
        yield from _write_input(one, tally, part, job)
    _write_record(job, number, Finished(stamps, tallies, part.finish()))


def _write_input(one: Input, tally: Tally, part: PartWriter, job: PrepareJob) -> Iterator[tuple[int, int]]:
    """Write the documents of one input to the part; gives bytes and tokens since the last time."""
    settings = job.settings
    vocabulary = job.vocabulary
    reading = InputOptions(settings.text_key, settings.source, vocabulary.separator, settings.learn, vocabulary.chat)
    behind = 0
    for batch in in_runs(read(one, reading, tally), lambda document: len(document.content), BATCH, MOST):
        count = 0
        for document, (tokens, mask) in zip(batch, tokenized(batch, vocabulary), strict=True):
            if not _is_kept(document, tokens, mask, settings, tally):
                continue
            content = document.content if isinstance(document.content, str) else tokens
            split = "validation" if in_validation(content, settings.validation) else "train"
            part.write(f"{split}/{document.source}", ended(tokens, document, vocabulary), mask)
            count += len(tokens) + 1
        yield tally.position - behind, count
        behind = tally.position
    tally.judge()
    yield one.size - behind, 0


def _is_kept(
    document: Document, tokens: np.ndarray, mask: np.ndarray | None, settings: FolderSettings, tally: Tally
) -> bool:
    """Whether a document is written; counts those that are not."""
    if not len(tokens):
        tally.empty += 1
        return False
    if mask is not None and not mask.any():
        tally.reject(document.where, f"{NOTHING}: what is learned has the last character of no token")
        return False
    short = settings.min_tokens is not None and len(tokens) + 1 < settings.min_tokens
    long = settings.max_tokens is not None and len(tokens) + 1 > settings.max_tokens
    tally.short, tally.long = tally.short + short, tally.long + long
    return not (short or long)


def record_file(job: PrepareJob, number: int) -> Path:
    """Where a part's record stands, if it is finished."""
    return job.work / "records" / f"{part_name(number)}.npz"


def _write_record(job: PrepareJob, number: int, finished: Finished) -> None:
    """Shards first, then what says that they are there, each flushed to the disk."""
    root, arrays, entries = job.work / TOKENS, {}, {}
    for where, record in finished.records.items():
        entries[where], arrays[where] = record.entries, record.lengths
        if record.learned is not None:
            arrays[f"learned/{where}"] = record.learned
        for file in (root / where / part_name(number)).iterdir():
            sync(file)
    tallies = [{key: value for key, value in vars(tally).items() if key != "max_bad"} for tally in finished.tallies]
    about = json.dumps({"stamps": finished.stamps, "tallies": tallies, "entries": entries})
    stored = io.BytesIO()
    np.savez(stored, about=np.frombuffer(about.encode(), np.uint8), **arrays)
    put(record_file(job, number), stored.getvalue())


def read_record(job: PrepareJob, number: int) -> Finished | None:
    """A finished part; None where it is not, or where its shards are not what they were."""
    file = record_file(job, number)
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as arrays:
        about = _about(arrays)
        records = {
            where: PartRecord(entries, arrays[where], arrays.get(f"learned/{where}"))
            for where, entries in about["entries"].items()
        }
    for where, record in records.items():
        for info in (entry["zip_data"] or entry["raw_data"] for entry in record.entries):
            shard = job.work / TOKENS / where / info["basename"]
            if not shard.exists() or shard.stat().st_size != info["bytes"]:
                return None
    counted = about["tallies"] if "tallies" in about else [about["tally"]]  # one where a part was one input
    tallies = [Tally(**values, max_bad=job.max_bad) for values in counted]
    return Finished(about["stamps"], tallies, records)


def _about(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(arrays["about"].tobytes())


def holds_documents(job: PrepareJob) -> bool:
    """Check whether a finished part has a document: all else is written again in any case."""
    for file in (job.work / "records").glob("*.npz"):
        with np.load(file, allow_pickle=False) as arrays:
            if _about(arrays)["entries"]:
                return True
    return False


def stamps_of(inputs: Sequence[Input]) -> list[list[int]]:
    """Size and time of every file of a part's inputs."""
    return [stamp for one in inputs for stamp in one.stamps()]


def changed_files(inputs: Sequence[Input], finished: Finished) -> list[Path]:
    """List the files of a part that changed after it was written; all of them where their number did."""
    files = [file for one in inputs for file in one.files]
    before = finished.stamps
    if len(before) != len(files):
        return files
    return [file for file, then, now in zip(files, before, stamps_of(inputs), strict=True) if then != now]
