"""Helpers that the tests of preparation share: a small tokenizer, files of every format, and a reader of the result."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.documents import Document, InputOptions, Tally
from hybridtron.data.prepare.embedded import END_OF_TEXT, train_tokenizer
from hybridtron.data.prepare.formats import read
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.vocabulary import Vocabulary, vocabulary_of
from tests.data.mosaic import MDSReader, compression

TEXTS = [
    "def main() -> None:\n\tprint('naïve café ☕')\n\n\n",
    f"A text that spells {END_OF_TEXT} continues behind it.\r\n  Two  spaces.",
    "日本語のテキスト " * 5,
    " leading and trailing space ",
    'quotes " and \\ and a line\u2028separator, \x00 too',
]


def texts(count: int, name: str = "") -> list[str]:
    return [f"{TEXTS[i % len(TEXTS)]} {name}{i}" for i in range(count)]


def write_tokenizer(folder: Path, vocab_size: int = 400) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(TEXTS, vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def lines_of(contents: Iterable[str]) -> bytes:
    """JSON lines, each with an id that does not compress."""
    lines = ({"text": text, "id": hashlib.sha256(text.encode()).hexdigest()} for text in contents)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def write_jsonl(file: Path, contents: Sequence[str]) -> Path:
    """Plain, gzip or zstd by the file's name; compressed ones as two frames, one after the other."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = len(contents) // 2
    frames = [lines_of(contents[:half]), lines_of(contents[half:])]
    if file.suffix.lower() == ".zst":
        frames = [zstd(frame) for frame in frames]
    elif file.suffix == ".gz":
        frames = [gzip.compress(frame) for frame in frames]
    file.write_bytes(b"".join(frames))
    return file


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


DEFAULT = InputOptions()


def read_all(*patterns: Path | str, reading: InputOptions = DEFAULT, max_bad: float = 0.0) -> list[Document]:
    documents = []
    for data_input in find([str(pattern) for pattern in patterns]).inputs:
        tally = Tally(data_input.name, "lines", max_bad)
        input_documents = list(read(data_input, reading, tally))
        assert tally.entries == len(input_documents) + tally.bad + tally.empty
        assert 0 <= tally.position <= data_input.size
        tally.judge()
        documents += input_documents
    return documents


def contents(documents: list[Document]) -> list:
    return [
        document.content if isinstance(document.content, str) else document.content.tolist() for document in documents
    ]


def stored(folder: TokenFolder, split: str, source: str, column: str = "tokens") -> list[list[int]]:
    """Every document of a source, by its index alone, as mosaicml-streaming reads it."""
    root = folder.source_path(split, source)
    documents = []
    for entry in json.loads((root / "index.json").read_text())["shards"]:
        reader = MDSReader.from_json(str(root), None, entry)
        if entry["compression"]:
            packed = (root / entry["zip_data"]["basename"]).read_bytes()
            data = compression.decompress(entry["compression"], packed)
            ends = np.frombuffer(data, np.uint32, reader.samples + 1, 4)
            samples = [reader.decode_sample(data[ends[i] : ends[i + 1]]) for i in range(reader.samples)]
        else:
            samples = [reader[i] for i in range(reader.samples)]
        documents += [sample[column].tolist() for sample in samples]
    assert [len(document) for document in documents] == folder.lengths(split, source).tolist()
    return documents


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write_inputs(folder: Path) -> Path:
    for number, suffix in enumerate((".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl")):
        write_jsonl(folder / f"{number}{suffix}", texts(60, f"{number}-"))
    return folder


def all_documents(folder: TokenFolder) -> list[list[int]]:
    return [
        document
        for split, sources in folder.manifest.splits.items()
        for source in sources
        for document in stored(folder, split, source)
    ]


def words(count: int, eos: str = "</s>") -> Vocabulary:
    """A tokenizer of `count` entries, eos the last."""
    entries = {f"w{number}": number for number in range(count - 1)} | {eos: count - 1}
    tokenizer = Tokenizer(WordLevel(entries, "w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([eos])
    return vocabulary_of(tokenizer.to_str(), "words", None)
