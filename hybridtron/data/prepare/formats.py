"""The registry of input formats. For each file, formats are tried in this order.

docs/extending.md shows how to add a format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from hybridtron.data.prepare.corpus import EMBEDDED, PACKAGE
from hybridtron.data.prepare.documents import Document, Input, InputError, InputOptions, Tally, check_regular
from hybridtron.data.prepare.input_tokens import MDS, MEGATRON, PACKED
from hybridtron.data.prepare.inputs import JSONL, PARQUET, TEXT

FORMATS = {
    "jsonl": JSONL,
    "parquet": PARQUET,
    "text": TEXT,
    "packed": PACKED,
    "megatron": MEGATRON,
    "mds": MDS,
    "embedded": EMBEDDED,
    "package": PACKAGE,
}


def known_formats() -> str:
    """Return a list of all formats, as text for a message."""
    return "Known formats:" + "".join(f"\n  {input_format.described}" for input_format in FORMATS.values())


def inputs_of(file: Path) -> list[Input]:
    """Return the inputs that a file stands for; an empty list if the file's format is not known."""
    for name, known in FORMATS.items():
        if known.suffixes and file.name.lower().endswith(known.suffixes):
            check_regular(file)
            if file_groups := known.files(file):
                return [Input(name, files, number) for number, files in enumerate(file_groups)]
    return []


def read(entry: Input, reading: InputOptions, tally: Tally) -> Iterator[Document]:
    """Yield an input's documents; raise InputError if the input is damaged, or has too many bad entries."""
    try:
        yield from FORMATS[entry.format].read(entry, reading, tally)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{entry.name} can't be read to its end, so it is damaged or truncated: {error}", code="unreadable"
        ) from error
