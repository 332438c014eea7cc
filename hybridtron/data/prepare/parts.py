"""One part of a folder of prepared tokens: an input's documents, tokenized and written, and the record that they are.

A part depends on its input, the vocabulary and the settings alone, not on the others, nor on the process that writes
it. Its record is written last, and whole or not at all: what has no record counts as not begun.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class Finished(NamedTuple):
    """What a record holds: the input as it was, what reading it came to, and what the part holds."""

    stamps: list[list[int]]
    tally: Tally
    records: Records


def part_name(number: int) -> str:
    return f"part-{number:05}"


def write_part(job: PrepareJob, number: int) -> Iterator[tuple[int, int]]:
    """Write a part and its record; gives the bytes of the input that were read, and the tokens, since the last time."""
    one, settings, vocabulary = job.inputs[number], job.settings, job.vocabulary
    stamps, tally = one.stamps(), Tally(one.name, FORMATS[one.format].noun, job.max_bad)
    reading = InputOptions(settings.text_key, settings.source, vocabulary.separator, settings.learn, vocabulary.chat)
    written = vocabulary.size, settings.shard_size, settings.compression, settings.learn is not None
    part = PartWriter(job.work / TOKENS, part_name(number), *written)
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
    _write_record(job, number, Finished(stamps, tally, part.finish()))
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
    tally = {key: value for key, value in vars(finished.tally).items() if key != "max_bad"}
    about = json.dumps({"stamps": finished.stamps, "tally": tally, "entries": entries})
    stored = io.BytesIO()
    np.savez(stored, about=np.frombuffer(about.encode(), np.uint8), **arrays)
    put(record_file(job, number), stored.getvalue())


def read_record(job: PrepareJob, number: int) -> Finished | None:
    """A finished part; None where it is not, or where its shards are not what they were."""
    file = record_file(job, number)
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        records = {
            where: PartRecord(entries, arrays[where], arrays.get(f"learned/{where}"))
            for where, entries in about["entries"].items()
        }
    for where, record in records.items():
        for info in (entry["zip_data"] or entry["raw_data"] for entry in record.entries):
            shard = job.work / TOKENS / where / info["basename"]
            if not shard.exists() or shard.stat().st_size != info["bytes"]:
                return None
    return Finished(about["stamps"], Tally(**about["tally"], max_bad=job.max_bad), records)
