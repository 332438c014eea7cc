"""Documents from text inputs: JSON lines, parquet files, and plain text files."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hybridtron.data.prepare.documents import (
    Document,
    Format,
    Input,
    InputError,
    InputOptions,
    Learned,
    Tally,
    clean_name,
)
from hybridtron.data.prepare.learned import FORMS, text_of
from hybridtron.requirements import missing
from hybridtron.safe_open import open_regular, read_regular

BLOCK = 2**20  # number of bytes that are read at once
MAX_LINE_BYTES = 2**28  # maximum size of a JSON line; longer lines are skipped without keeping them in memory
MAX_TEXT_BYTES = 2**32  # maximum size of a text file
ROWS = 256  # number of parquet rows that are decoded at once
# first bytes of compressed files; a zstd file may also begin with one of 16 kinds of skippable frames
GZIP = b"\x1f\x8b"
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16)))


def _pyarrow(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"parquet and zstd inputs need a missing package: {missing('prepare') or error}", code="not-installed"
        ) from error


@contextmanager
def _open_decompressed(file: Path) -> Iterator[tuple[BufferedIOBase, BufferedIOBase]]:
    """Open a file, which may be compressed; yield its decompressed contents, and the file as it is stored.

    The position in the stored file shows the progress. Raises OSError if a file named .gz or .zst is not compressed.
    """
    with io.BufferedReader(open_regular(file), BLOCK) as raw:
        head = raw.read(4)
        raw.seek(0)
        if head.startswith(GZIP):
            yield io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=raw)), BLOCK), raw
        elif head in ZSTD:
            arrow = _pyarrow("pyarrow")
            stream = arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), "zstd")
            yield io.BufferedReader(stream, BLOCK), raw
        elif file.suffix.lower() in (".gz", ".zst"):
            raise OSError("it does not start with a gzip or zstd header" if head else "it is empty")
        else:
            yield raw, raw


def read_jsonl(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each JSON line. Bad lines are counted and skipped."""
    (file,) = entry.files
    with _open_decompressed(file) as (contents, raw):
        for number, line in enumerate(_lines(contents), 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.rstrip(b"\r\n")
            if not line or line.isspace():
                continue
            tally.entries += 1
            tally.position = raw.tell()
            if len(line) > MAX_LINE_BYTES:
                tally.reject(f"line {number}", f"has more than {MAX_LINE_BYTES} bytes")
                continue
            try:
                text, learned, source = _of_record(json.loads(line.decode("utf-8")), reading)
            except (ValueError, RecursionError) as error:
                tally.reject(f"line {number}", str(error))
                continue
            if tally.accept(text):
                yield Document(text, source, f"{file}, line {number}", learned)


def _lines(contents: BufferedIOBase) -> Iterator[bytes]:
    """Yield lines. A line that is too long is truncated to MAX_LINE_BYTES + 1 bytes.

    That is one byte more than the limit, so that the caller can recognize the line and reject it.
    """
    while line := contents.readline(MAX_LINE_BYTES + 1):
        rest = line if len(line) > MAX_LINE_BYTES else b""
        while rest and not rest.endswith(b"\n"):
            rest = contents.readline(BLOCK)
        yield line


def _of_record(record: object, reading: InputOptions) -> tuple[str, Learned | None, str]:
    """Return a JSON object's text, the characters that count in the loss (None if all do), and the name of its source.

    Raises ValueError if the object is malformed.
    """
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    learned = None
    if reading.learn is not None:
        text, learned = FORMS[reading.learn](record, reading)
    else:
        other = next((form for form in FORMS if form in record and reading.text_key not in record), None)
        if other is not None:
            raise ValueError(f"has the key {other!r} instead of {reading.text_key!r}; set --learn {other} to read it")
        text = text_of(record, reading.text_key)
    text.encode()  # raises ValueError for lone surrogates, which JSON can contain but tokenizers refuse
    return text, learned, _named_source(record.get("meta"), reading)


def _named_source(meta: object, reading: InputOptions) -> str:
    """Return the source's name from a record's `meta`, as RedPajama stores it; else the name in the options."""
    if isinstance(meta, dict):
        name = meta.get("redpajama_set_name")
    else:
        name = None
    if isinstance(name, str) and name:
        return clean_name(name)
    return reading.source


def read_parquet(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each row. Bad rows are counted and skipped."""
    (file,) = entry.files
    arrow = _pyarrow("pyarrow")
    parquet = _pyarrow("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file, page_checksum_verification=True)
    except arrow.ArrowException as error:
        raise OSError(str(error)) from error
    with table:
        columns = _columns(table.schema_arrow, file, reading, arrow)
        number = 0
        for group in range(table.num_row_groups):
            for batch in _batches(table, group, columns, arrow):
                for text, meta in zip(*_values(batch, columns), strict=True):
                    number += 1
                    tally.entries += 1
                    try:
                        content = text.as_py()
                        if meta is not None:
                            source = _named_source(meta.as_py(), reading)
                        else:
                            source = reading.source
                    except UnicodeDecodeError as error:
                        tally.reject(f"row {number}", str(error))
                        continue
                    if content is None:
                        tally.reject(f"row {number}", f"{reading.text_key!r} is null")
                    elif tally.accept(content):
                        yield Document(content, source, f"{file}, row {number}")
            tally.position = entry.size * (group + 1) // table.num_row_groups


def _columns(schema: Any, file: Path, reading: InputOptions, arrow: ModuleType) -> list[str]:
    """Return the names of the columns to read: the text column, and the column with the source's name if it exists.

    Raises InputError if there is no text column, or if it does not contain strings.
    """
    if reading.text_key not in schema.names:
        named = ", ".join(schema.names)
        raise InputError(
            f"{file} has no column {reading.text_key!r}; set --text-key to one of its columns: {named}",
            code="unknown-name",
        )
    kind = schema.field(reading.text_key).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise InputError(
            f"{file} has a column {reading.text_key!r} of type {kind}; set --text-key to a column of strings",
            code="wrong-type",
        )
    if "meta" in schema.names:
        meta = schema.field("meta").type
    else:
        meta = None
    named = meta is not None and arrow.types.is_struct(meta) and meta.get_field_index("redpajama_set_name") >= 0
    if named:
        return [reading.text_key, "meta.redpajama_set_name"]
    return [reading.text_key]


def _batches(table: Any, group: int, columns: list[str], arrow: ModuleType) -> Iterator[Any]:
    try:
        yield from table.iter_batches(batch_size=ROWS, row_groups=[group], columns=columns)
    except arrow.ArrowException as error:
        raise OSError(str(error)) from error


def _values(batch: Any, columns: list[str]) -> tuple[Any, Any]:
    """Return the texts of a batch, and for each text its `meta`, or None if only the text column is read."""
    return batch.column(columns[0]), batch.column("meta") if len(columns) > 1 else [None] * batch.num_rows


def read_texts(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each file. Files that are not UTF-8 are counted as bad and skipped."""
    for file in entry.files:
        tally.entries += 1
        data = read_regular(file, MAX_TEXT_BYTES)
        tally.position += len(data)
        try:
            text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            tally.reject(str(file), str(error))
            continue
        if tally.accept(text):
            yield Document(text, reading.source, str(file))


JSONL = Format(
    "*.jsonl, also .jsonl.gz, .jsonl.zst, .json.gz, .json.zst: one JSON object a line",
    read_jsonl,
    (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"),
    "lines",
    learn=tuple(FORMS),
)
PARQUET = Format("*.parquet: a column of text", read_parquet, (".parquet",), "rows")
TEXT = Format("*.txt, *.md: one document a file", read_texts, (".txt", ".md"), "files")
