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

from hybridtron.data.prepare.documents import Document, Input, InputError, InputOptions, Tally, in_runs, in_validation
from hybridtron.data.prepare.formats import FORMATS, read
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import SHARD_SIZE, PartRecord, PartWriter, Records, token_dtype
from hybridtron.storage.durable import put, sync

BATCH = 2**20  # characters tokenized at once; it takes about a hundred bytes for each
MOST = 2**12  # documents tokenized at once
PIECE = 2**23  # characters of a document beyond which it is tokenized in pieces
NEAR = 2**16  # characters before a piece's end in which a good place to cut is looked for
LARGEST = 2**32 - 2**12  # bytes of a document; an MDS shard stores its offsets in 32 bits
TOKENS = "tokens"  # the folder within the work folder that becomes the output


@dataclass(frozen=True)
class FolderSettings:
    """What beside inputs and vocabulary decides how a folder looks; the names are those of the options."""

    validation: float = 0.005
    shard_size: int = SHARD_SIZE
    compression: str | None = None
    text_key: str = "text"
    source: str = "text"


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
    reading = InputOptions(settings.text_key, settings.source, vocabulary.separator)
    part = PartWriter(job.work / TOKENS, part_name(number), vocabulary.size, settings.shard_size, settings.compression)
    behind = 0
    for batch in in_runs(read(one, reading, tally), lambda document: len(document.content), BATCH, MOST):
        count = 0
        for document, tokens in zip(batch, _tokens_of(batch, vocabulary), strict=True):
            if not len(tokens):
                tally.empty += 1
                continue
            content = document.content if isinstance(document.content, str) else tokens
            split = "validation" if in_validation(content, settings.validation) else "train"
            part.write(f"{split}/{document.source}", _ended(tokens, document, vocabulary))
            count += len(tokens) + 1
        yield tally.position - behind, count
        behind = tally.position
    tally.judge()
    _write_record(job, number, Finished(stamps, tally, part.finish()))
    yield one.size - behind, 0


def _tokens_of(batch: list[Document], vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """Tokens of each document, without eos."""
    tokenizer = vocabulary.tokenizer()
    texts = [document.content for document in batch if isinstance(document.content, str)]
    short = [text for text in texts if len(text) <= PIECE]
    encoded = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False))
    for content, _, where in batch:
        if not isinstance(content, str):
            yield _checked(content, where, vocabulary)
        elif len(content) <= PIECE:
            yield np.array(next(encoded).ids, np.int64)
        else:
            pieces = (tokenizer.encode_batch_fast([piece], add_special_tokens=False) for piece in cut(content))
            yield np.concatenate([np.array(encoding.ids, np.int64) for (encoding,) in pieces])


def cut(text: str) -> Iterator[str]:
    """Pieces of a text too long for one tokenization, each ending with a line.

    They end behind a single line break, which common tokenizers part words at, so that the tokens are those of the
    whole; where there is none near, or with a tokenizer that marks the start of a text, some at the cut differ.
    """
    first = 0
    while len(text) - first > PIECE:
        end = place = first + PIECE
        while (place := text.rfind("\n", first + PIECE - NEAR, place)) > 0:
            if not (text[place - 1].isspace() or text[place + 1].isspace()):
                end = place + 1
                break
        yield text[first:end]
        first = end
    yield text[first:]


def _checked(content: np.ndarray, where: str, vocabulary: Vocabulary) -> np.ndarray:
    """Tokens that another program made, without the eos that it may have put there."""
    tokens = content.astype(np.int64).reshape(-1)
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary.size)]
    if len(wrong):
        raise InputError(
            f"{where}: has token {wrong[0]}, and the tokenizer {vocabulary.name} ends at {vocabulary.size - 1}; "
            "the tokens were made with another one: give that as --tokenizer"
        )
    return tokens[:-1] if len(tokens) and tokens[-1] == vocabulary.eos else tokens


def _ended(tokens: np.ndarray, document: Document, vocabulary: Vocabulary) -> np.ndarray:
    size = (len(tokens) + 1) * np.dtype(token_dtype(vocabulary.size)).itemsize
    if size > LARGEST:
        raise InputError(f"{document.where}: makes {size} bytes of tokens; a document can have {LARGEST}: split it")
    return np.append(tokens, vocabulary.eos)


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
