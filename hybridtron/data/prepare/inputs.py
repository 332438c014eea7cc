"""Documents from text files: JSON lines, parquet, and plain files. `input_tokens.py` reads files of tokens."""

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
from hybridtron.regular_files import open_regular, read_regular
from hybridtron.requirements import missing

BLOCK = 2**20  # bytes read at once
LONGEST_LINE = 2**28  # bytes of a JSON line; longer lines are skipped block by block, which bounds memory
LONGEST_TEXT = 2**32  # bytes of a text file, which is one document
ROWS = 256  # parquet rows decoded at once
GZIP = b"\x1f\x8b"
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16)))  # or skippable frames


def _pyarrow(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"parquet and zstd inputs need what is absent: {missing('prepare') or error}") from error


@contextmanager
def _decompressed(file: Path) -> Iterator[tuple[BufferedIOBase, BufferedIOBase]]:
    """Open a file; yield its decompressed contents, and the file itself, whose position shows the progress."""
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
            raise OSError("it does not start as compressed data does" if head else "it is empty")
        else:
            yield raw, raw


def read_jsonl(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each JSON line. Bad lines are counted and skipped."""
    (file,) = one.files
    with _decompressed(file) as (contents, raw):
        for number, line in enumerate(_lines(contents), 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.rstrip(b"\r\n")
            if not line or line.isspace():
                continue
            tally.entries += 1
            tally.position = raw.tell()
            if len(line) > LONGEST_LINE:
                tally.reject(f"line {number}", f"has more than {LONGEST_LINE} bytes")
                continue
            try:
                text, learned, source = _of_record(json.loads(line.decode("utf-8")), reading)
            except (ValueError, RecursionError) as error:
                tally.reject(f"line {number}", str(error))
                continue
            if tally.keeps(text):
                yield Document(text, source, f"{file}, line {number}", learned)


def _lines(contents: BufferedIOBase) -> Iterator[bytes]:
    """Yield lines. A line above LONGEST_LINE is cut one byte above it, and its rest is skipped."""
    while line := contents.readline(LONGEST_LINE + 1):
        rest = line if len(line) > LONGEST_LINE else b""
        while rest and not rest.endswith(b"\n"):
            rest = contents.readline(BLOCK)
        yield line


def _of_record(record: object, reading: InputOptions) -> tuple[str, Learned | None, str]:
    """Return a JSON object's text, its learned part and its source; raise ValueError if it has no such text."""
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    learned = None
    if reading.learn is not None:
        text, learned = FORMS[reading.learn](record, reading)
    else:
        other = next((form for form in FORMS if form in record and reading.text_key not in record), None)
        if other is not None:
            raise ValueError(f"has no key {reading.text_key!r} but {other!r}, which --learn {other} reads")
        text = text_of(record, reading.text_key)
    text.encode()  # raises ValueError for lone surrogates, which JSON can hold but no tokenizer takes
    return text, learned, _named_source(record.get("meta"), reading)


def _named_source(meta: object, reading: InputOptions) -> str:
    if isinstance(meta, dict):
        name = meta.get("redpajama_set_name")
    else:
        name = None
    if isinstance(name, str) and name:
        return clean_name(name)
    return reading.source


def read_parquet(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each row. Bad rows are counted and skipped."""
    (file,) = one.files
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
                    elif tally.keeps(content):
                        yield Document(content, source, f"{file}, row {number}")
            tally.position = one.size * (group + 1) // table.num_row_groups


def _columns(schema: Any, file: Path, reading: InputOptions, arrow: ModuleType) -> list[str]:
    """Return the columns to read: the text and, if there is one, the source's name."""
    if reading.text_key not in schema.names:
        named = ", ".join(schema.names)
        raise InputError(f"{file} has no column {reading.text_key!r}; --text-key names one of its own: {named}")
    kind = schema.field(reading.text_key).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise InputError(f"{file} has a column {reading.text_key!r} of {kind}, not of strings; --text-key names one")
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
    return batch.column(columns[0]), batch.column("meta") if len(columns) > 1 else [None] * batch.num_rows


def read_texts(one: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield a document for each file. Files not in UTF-8 are counted and skipped."""
    for file in one.files:
        tally.entries += 1
        data = read_regular(file, LONGEST_TEXT)
        tally.position += len(data)
        try:
            text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        except UnicodeDecodeError as error:
            tally.reject(str(file), str(error))
            continue
        if tally.keeps(text):
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
