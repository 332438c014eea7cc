"""Writes one part of a prepared folder: the tokenized documents of some inputs, and a record about them.

Several small inputs share a part, so that the number of shards depends on the inputs' bytes, and not on how many files
there are. A part depends only on its inputs, the vocabulary and the settings. So parts can be written in parallel and
in any order. The record is written last, as one atomic operation. If preparation is interrupted, the parts without a
record are written again from their start.
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
from hybridtron.data.prepare.learned import NOTHING_LEARNED
from hybridtron.data.prepare.tokenized import append_eos, tokenized
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import SHARD_SIZE, PartRecord, PartWriter, Records
from hybridtron.storage.durable import put, sync

BATCH = 2**20  # number of characters that are tokenized at once; each takes about 100 bytes of memory
MAX_DOCUMENTS = 2**12  # maximum number of documents that are tokenized at once
TOKENS = "tokens"  # name of the folder, inside the work folder, that is renamed to the output


@dataclass(frozen=True)
class FolderSettings:
    """The options for `hybridtron data prepare` that affect the output, except the inputs and the tokenizer.

    validation: fraction of documents in the validation split
    min_tokens, max_tokens: documents with fewer or more tokens, including eos, are left out
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
    """Everything that a process needs to write any part of a folder.

    work: folder for the unfinished output
    max_bad: maximum fraction of an input's entries that may be bad
    """

    work: Path
    inputs: tuple[Input, ...]
    vocabulary: Vocabulary
    settings: FolderSettings
    max_bad: float

    @cached_property
    def parts(self) -> tuple[tuple[Input, ...], ...]:
        """Each part's inputs. Consecutive inputs form a part when their sizes add up to a shard's size."""
        runs = in_runs(self.inputs, lambda data_input: data_input.size, self.settings.shard_size, len(self.inputs))
        return tuple(tuple(run) for run in runs)


class Finished(NamedTuple):
    """A part's record.

    stamps: each input file's size and mtime
    tallies: entry counts for each input
    records: SPLIT/SOURCE -> the part's shards for this source
    """

    stamps: list[list[int]]
    tallies: list[Tally]
    records: Records


def part_name(number: int) -> str:
    return f"part-{number:05}"


def write_part(job: PrepareJob, number: int) -> Iterator[tuple[int, int]]:
    """Write a part and its record.

    Yields (input bytes read, tokens written) from time to time; both count from the previous yield.
    """
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
    tallies = [Tally(data_input.name, FORMATS[data_input.format].noun, job.max_bad) for data_input in inputs]
    for data_input, tally in zip(inputs, tallies, strict=True):
        yield from _write_input(data_input, tally, part, job)
    _write_record(job, number, Finished(stamps, tallies, part.finish()))


def _write_input(entry: Input, tally: Tally, part: PartWriter, job: PrepareJob) -> Iterator[tuple[int, int]]:
    """Write an input's documents to the part; yield (bytes read, tokens written), counted from the previous yield."""
    settings = job.settings
    vocabulary = job.vocabulary
    reading = InputOptions(settings.text_key, settings.source, vocabulary.separator, settings.learn, vocabulary.chat)
    behind = 0
    for batch in in_runs(read(entry, reading, tally), lambda document: len(document.content), BATCH, MAX_DOCUMENTS):
        count = 0
        for document, (tokens, mask) in zip(batch, tokenized(batch, vocabulary), strict=True):
            if not _is_kept(document, tokens, mask, settings, tally):
                continue
            if isinstance(document.content, str):
                content = document.content
            else:
                content = tokens
            if in_validation(content, settings.validation):
                split = "validation"
            else:
                split = "train"
            part.write(f"{split}/{document.source}", append_eos(tokens, document, vocabulary), mask)
            count += len(tokens) + 1
        yield tally.position - behind, count
        behind = tally.position
    tally.judge()
    yield entry.size - behind, 0


def _is_kept(
    document: Document, tokens: np.ndarray, mask: np.ndarray | None, settings: FolderSettings, tally: Tally
) -> bool:
    """Return True if a document is to be written; otherwise count the reason in the tally."""
    if not len(tokens):
        tally.empty += 1
        return False
    if mask is not None and not mask.any():
        tally.reject(document.where, f"{NOTHING_LEARNED}: no token ends in the learned text")
        return False
    short = settings.min_tokens is not None and len(tokens) + 1 < settings.min_tokens
    long = settings.max_tokens is not None and len(tokens) + 1 > settings.max_tokens
    tally.short = tally.short + short
    tally.long = tally.long + long
    return not (short or long)


def record_file(job: PrepareJob, number: int) -> Path:
    """Return the path for a part's record. The record exists if the part is finished."""
    return job.work / "records" / f"{part_name(number)}.npz"


def _write_record(job: PrepareJob, number: int, finished: Finished) -> None:
    """Flush a part's shards to disk, then write the part's record."""
    root = job.work / TOKENS
    arrays: dict[str, Any] = {}
    entries = {}
    for where, record in finished.records.items():
        entries[where] = record.entries
        arrays[where] = record.lengths
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
    """Return a part's record; None if there is no record, or if a shard is missing or has another size."""
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
    # records of earlier versions have one tally, because a part had one input
    if "tallies" in about:
        counted = about["tallies"]
    else:
        counted = [about["tally"]]
    tallies = [Tally(**values, max_bad=job.max_bad) for values in counted]
    return Finished(about["stamps"], tallies, records)


def _about(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(arrays["about"].tobytes())


def holds_documents(job: PrepareJob) -> bool:
    """Return True if a finished part has a document. If not, the unfinished output may be deleted without loss."""
    for file in (job.work / "records").glob("*.npz"):
        with np.load(file, allow_pickle=False) as arrays:
            if _about(arrays)["entries"]:
                return True
    return False


def stamps_of(inputs: Sequence[Input]) -> list[list[int]]:
    """Return size and mtime for every file in a part's inputs."""
    return [stamp for data_input in inputs for stamp in data_input.stamps()]


def changed_files(inputs: Sequence[Input], finished: Finished) -> list[Path]:
    """List a part's input files that changed after the part was written; all files if their number changed."""
    files = [file for data_input in inputs for file in data_input.files]
    before = finished.stamps
    if len(before) != len(files):
        return files
    return [file for file, then, now in zip(files, before, stamps_of(inputs), strict=True) if then != now]
